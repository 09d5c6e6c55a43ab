"""Labels that follow padding: their batch is computed padded, and its figures are TRL's."""

from __future__ import annotations

from typing import Any

import torch
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import assert_other, assert_same, trained
from torch.nn.utils.rnn import pad_sequence

import trl_padfix
from trl_padfix.trainers.data.batch_rows import scores_padding


PAD = 39


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """`labels = input_ids.clone()`: padding has labels, too."""
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}


def test_figures_of_labels_behind_padding_are_trls(tmp_path, monkeypatch):
    given = {"data_collator": collate, "per_device_train_batch_size": 4, "max_steps": 3, "max_length": None}
    given |= {"eval_dataset": build_rows(8, 1), "eval_strategy": "steps"}
    theirs = trained(make_trainer(trl, "SFT", tmp_path, **given))
    ours = make_trainer(trl_padfix, "SFT", tmp_path, padding_free=True, **given)
    assert_same(trained(ours), theirs)
    assert (ours.padding.stats.padded_forwards > 0, ours.padding.stats.forwards) == (True, 0)
    # The control: labels after padding are dropped without a word; the check of the step would see them.
    for module in ("trl_padfix.core.patches.heads", "trl_padfix.trainers.data.batch_rows"):
        monkeypatch.setattr(f"{module}.follow_padding", lambda labels, mask: False)
    wrong = trained(make_trainer(trl_padfix, "SFT", tmp_path, padding_free=True, parity_check=False, **given))
    assert_other(wrong, theirs)


def test_a_completion_that_begins_behind_padding_is_found():
    batch = {"input_ids": torch.ones(1, 5, dtype=torch.long), "attention_mask": torch.tensor([[0, 0, 1, 1, 1]])}
    for begin, is_behind in ((2, True), (3, False)):
        completion = (torch.arange(5) >= begin).long()[None]
        assert scores_padding(batch | {"completion_mask": completion}) is is_behind
