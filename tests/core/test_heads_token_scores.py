"""Score heads that read several positions of a row: answers to many questions about one context."""

import random

import pytest
import torch
from kit.observe import entered_tokens
from kit.tolerance import tolerance
from kit.trainer_runs import break_mode, our_warnings
from transformers import AutoModelForQuestionAnswering, AutoModelForTokenClassification
from zoo import models

from trl_padfix import PaddingRemovalError, remove_padding


CONTEXT = list(range(2, 12))
"""What all rows begin with."""


def questions(side):
    """Rows of the context and up to three questions, with an answer at the last token of each question."""
    draw, rows = random.Random(0), []
    for _ in range(8):
        ids, labels = CONTEXT + draw.choices(range(2, 38), k=draw.randint(1, 6)), {}
        for _ in range(draw.randint(1, 3)):
            ids = ids + draw.choices(range(2, 38), k=draw.randint(1, 4))
            labels[len(ids) - 1] = draw.choice((0, 1))
        rows.append((ids, labels))
    columns = max(len(ids) for ids, _ in rows)
    batch = {"input_ids": torch.full((8, columns), models.PAD), "attention_mask": torch.zeros(8, columns).long()}
    batch["labels"] = torch.full((8, columns), -100)
    for i, (ids, labels) in enumerate(rows):
        begin = columns - len(ids) if side == "left" else 0
        kept = slice(begin, begin + len(ids))
        batch["input_ids"][i, kept], batch["attention_mask"][i, kept] = torch.tensor(ids), 1
        for place, label in labels.items():
            batch["labels"][i, begin + place] = label
    return batch


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
    model, batch = classifier().eval(), questions(side)
    theirs = outputs(model, batch)
    rows = [tuple(row[kept.bool()].tolist()) for row, kept in zip(*list(batch.values())[:2], strict=True)]
    prefixes = {row[: i + 1] for row in rows for i in range(len(row))}
    for sharing, tokens in ((False, sum(map(len, rows))), (True, len(prefixes))):
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
    model, batch = classifier().eval(), questions(side)
    batch["labels"][batch["attention_mask"] == 0] = 1
    theirs = outputs(model, batch)
    with remove_padding(model, prefix_sharing=True) as handle:
        for a, b in zip(outputs(model, batch), theirs, strict=True):
            assert torch.equal(a, b)
        outputs(model, batch)
        assert (handle.stats.padded_forwards, handle.stats.forwards) == (2, 0)
    assert (
        len([said for said in our_warnings(caplog) if "labels at tokens that the attention mask hides" in said]) == 1
    )
    with remove_padding(model, strict=True), pytest.raises(PaddingRemovalError, match="labels at tokens"):
        model(**batch)


def test_a_softmax_over_all_columns_is_refused_by_name():
    model = models.build("qwen2", auto=AutoModelForQuestionAnswering)
    with pytest.raises(
        PaddingRemovalError, match=r"Qwen2ForQuestionAnswering: its loss is a softmax over all columns"
    ):
        remove_padding(model)
    assert not any("forward" in vars(module) for module in model.modules())
