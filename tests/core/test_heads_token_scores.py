"""Score heads that read several positions of a row."""

import pytest
import torch
from kit.observe import entered_tokens
from kit.tolerance import tolerance
from kit.trainer_runs import break_mode, our_warnings
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification
from zoo import models
from zoo.model_numbers import DISTINCT, REAL

from trl_padfix import PaddingRemovalError, remove_padding


def labeled(side):
    """A batch, with labels at ids that are a multiple of 3."""
    given = models.inputs(side)
    ids, mask = given.values()
    return given | {"labels": (ids % 2).masked_fill((mask == 0) | (ids % 3 > 0), -100)}


def classifier():
    return models.build("qwen2", auto=AutoModelForTokenClassification, num_labels=2)


def outputs(model, batch):
    """Loss, the scores that are in it, and the gradient of every weight."""
    model.zero_grad()
    out = model(**batch)
    out["loss"].backward()
    scored = batch["labels"] != -100
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out["loss"].detach(), out["logits"][scored].detach(), gradients


@pytest.mark.parametrize("side", ["left", "right"])
def test_many_scores_of_a_row_are_those_of_the_padded_model(side, monkeypatch):
    model, batch = classifier().eval(), labeled(side)
    theirs = outputs(model, batch)
    for sharing, tokens in ((False, REAL), (True, DISTINCT)):
        with remove_padding(model, prefix_sharing=sharing) as handle, entered_tokens(model) as entered:
            ours = outputs(model, batch)
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).norm() / b.norm() < tolerance(1, terms=64, depth=48)
        assert list(entered) == [tokens]
        assert handle.stats.padded_tokens > tokens
    break_mode(monkeypatch, "prefix sharing")
    with remove_padding(model, prefix_sharing=True):
        wrong = outputs(model, batch)
    for a, b in zip(wrong, theirs, strict=True):
        assert (a - b).norm() / b.norm() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_of_padding_are_computed_padded_and_said_once(side, caplog):
    model, batch = classifier().eval(), labeled(side)
    batch["labels"][batch["attention_mask"] == 0] = 1
    theirs = outputs(model, batch)
    with remove_padding(model, prefix_sharing=True) as handle:
        for a, b in zip(outputs(model, batch), theirs, strict=True):
            assert torch.equal(a, b)
        outputs(model, batch)
        assert (handle.stats.padded_forwards, handle.stats.forwards) == (2, 0)
    assert sum("labels at tokens that the attention mask hides" in said for said in our_warnings(caplog)) == 1
    with remove_padding(model, strict=True), pytest.raises(PaddingRemovalError, match="labels at tokens"):
        model(**batch)


def test_a_softmax_over_all_columns_is_refused_by_name():
    model = models.build("qwen2", auto=AutoModelForQuestionAnswering)
    with pytest.raises(PaddingRemovalError, match="Qwen2ForQuestionAnswering: its loss is a softmax over all columns"):
        remove_padding(model)
    assert not any("forward" in vars(module) for module in model.modules())
