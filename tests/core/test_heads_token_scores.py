"""Score heads that read several positions of a row: answers to many questions about one context."""

import random

import pytest
import torch
from datasets import Dataset
from kit.cells import by_turns
from kit.observe import entered_tokens
from kit.tolerance import tolerance
from kit.trainer_runs import break_mode, our_warnings
from torch import nn
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoModelForTokenClassification
from zoo import models

from trl_padfix import (
    PaddingRemovalError,
    remove_padding,
)


CONTEXT = list(range(2, 12))
"""What all rows begin with."""


class Judge(nn.Module):
    """A module of a user's: a decoder, and a score at the last token of each question."""

    def __init__(self):
        super().__init__()
        self.decoder = models.build("qwen2", auto=AutoModel)
        torch.manual_seed(0)
        self.score = nn.Linear(32, 1)

    def forward(self, input_ids, attention_mask, ends, answers):
        states = self.decoder(input_ids, attention_mask=attention_mask).last_hidden_state
        scores = self.score(states[torch.arange(len(ends))[:, None], ends]).squeeze(-1)
        known = answers >= 0  # some rows have fewer questions
        loss = nn.functional.binary_cross_entropy_with_logits(scores[known], answers[known].float())
        return {"loss": loss, "logits": scores}


def questions(count=24):
    """A context with up to three questions, the last token of each, and the answers."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        ids, ends = CONTEXT + draw.choices(range(2, 38), k=draw.randint(1, 6)), []
        for _ in range(draw.randint(1, 3)):
            ids = ids + draw.choices(range(2, 38), k=draw.randint(1, 4))
            ends.append(len(ids) - 1)
        rows.append({"input_ids": ids, "ends": ends, "answers": draw.choices((0, 1), k=len(ends))})
    return Dataset.from_list(rows)


def collate(rows, side="right", of_tokens=False):
    columns, most = (max(len(row[name]) for row in rows) for name in ("input_ids", "ends"))
    ids = torch.full((len(rows), columns), models.PAD)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    ends, answers = torch.zeros(len(rows), most, dtype=torch.long), torch.full((len(rows), most), -1)
    for i, row in enumerate(rows):
        begin = columns - len(row["input_ids"]) if side == "left" else 0
        kept = slice(begin, begin + len(row["input_ids"]))
        ids[i, kept], mask[i, kept] = torch.tensor(row["input_ids"]), 1
        n = len(row["ends"])
        ends[i, :n], answers[i, :n] = torch.tensor(row["ends"]) + begin, torch.tensor(row["answers"])
        labels[i, ends[i, :n]] = answers[i, :n]
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | ({"labels": labels} if of_tokens else {"ends": ends, "answers": answers})


def classifier():
    return models.build("qwen2", auto=AutoModelForTokenClassification, num_labels=2)


KINDS = {"token classifier": (classifier, True), "module of a user's": (Judge, False)}


def outputs(model, batch):
    """Loss, the scores that are in it, and the gradient of every weight."""
    model.zero_grad()
    out = model(**batch)
    out["loss"].backward()
    of_tokens = "labels" in batch
    scored = batch["labels"] != -100 if of_tokens else batch["answers"] >= 0
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out["loss"].detach(), out["logits"][scored].detach(), gradients


@pytest.mark.parametrize(("kind", "side"), by_turns(KINDS, ["left", "right"]))
def test_many_scores_of_a_row_are_those_of_the_padded_model(kind, side, monkeypatch):
    build, of_tokens = KINDS[kind]
    model, batch = build().eval(), collate(list(questions(8)), side, of_tokens)
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
    model, batch = classifier().eval(), collate(list(questions(8)), side, of_tokens=True)
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
