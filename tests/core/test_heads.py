"""Heads on packed states: which labels are predicted, and which token a classifier scores."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from zoo.models import ROWS, batch, build
from zoo.stack_models import EOS

from trl_padfix import remove_padding
from trl_padfix.core.heads import LMHeadPatch


def labelled(side: str) -> dict[str, torch.Tensor]:
    ids, mask = batch(side)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_the_loss_of_labels_is_that_of_right_padding_on_either_side(name, sharing):
    model = build(name)
    expected = model(**labelled("right"), use_cache=False).loss
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    with remove_padding(model, prefix_sharing=sharing):
        for side in ("left", "right", "mixed", "both"):
            model.zero_grad()
            loss = model(**labelled(side)).loss
            loss.backward()
            torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                assert (parameter.grad - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7


def test_labels_predicted_from_padding_are_found_wrong(monkeypatch):
    model = build("qwen2")
    expected = model(**labelled("right"), use_cache=False).loss
    monkeypatch.setattr(LMHeadPatch, "_predicted_labels", lambda self, call: {})
    with remove_padding(model):
        assert abs(model(**labelled("left")).loss - expected) > 0.01


def test_labels_given_by_the_caller_stay_as_they_are():
    given = labelled("left")
    kept = given["labels"].clone()
    model = build("qwen2")
    with remove_padding(model):
        model(**given)
    assert torch.equal(given["labels"], kept)


# -- the token that a classifier scores


def classifier(**config) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    settings = build("qwen2").config.to_dict() | {"pad_token_id": EOS, "num_labels": 2} | config
    return transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**settings)).eval()


def ending_in_eos(side: str, pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = batch(side)
    for row in range(0, len(ROWS), 2):
        ids[row, mask[row].nonzero().max()] = EOS
    return ids.masked_fill(mask == 0, pad_id), mask


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_by_default_the_score_is_that_of_the_padded_computation(side, sharing):
    model = classifier()
    ids, mask = ending_in_eos(side, EOS)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    with remove_padding(model, prefix_sharing=sharing) as handle:
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, rtol=0, atol=1e-5)
    assert handle.stats.packed_tokens < mask.numel()
    with remove_padding(model, prefix_sharing=sharing, pool_last_token=True):
        last = model(ids, attention_mask=mask).logits
    assert ((last - expected).abs().amax(1) > 0.01).tolist() == [row % 2 == 0 for row in range(len(ROWS))]


def test_where_the_last_token_is_another_one_it_is_said_once(caplog):
    model = classifier()
    ids, mask = ending_in_eos("right", EOS)
    transformers.logging.enable_propagation()
    with caplog.at_level(logging.WARNING), remove_padding(model):
        model(ids, attention_mask=mask)
        model(ids, attention_mask=mask)
    transformers.logging.disable_propagation()
    said = [r.getMessage() for r in caplog.records if "pool_last_token=True" in r.getMessage()]
    assert len(said) == 1
    assert "In 4 of 7 rows" in said[0]
