"""Labels that follow padding: their batch is computed padded, and its figures are TRL's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import (
    assert_other,
    assert_same,
    trained,
)
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.dpo_trainer import DataCollatorForPreference

import trl_padfix


PAD = 39

# -- batches of a collator that somebody wrote


def padded(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    ids = pad_sequence([torch.tensor(row) for row in rows], True, PAD, side)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], True, 0, side)
    return {"input_ids": ids, "attention_mask": mask}


class Cloned:
    """`labels = input_ids.clone()`: padding has labels, too."""

    def __init__(self, side: str = "right"):
        self.side = side

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = padded([example["input_ids"] for example in examples], self.side)
        return batch | {"labels": batch["input_ids"].clone()}


class HidesSome(DataCollatorForPreference):
    """DPO: in some pairs the last token of the prompt is hidden, and the completion begins behind it."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        hidden = torch.tensor([sum(example["prompt_ids"]) % 8 == 0 for example in examples]).repeat(2)
        begins = batch["completion_mask"].argmax(1)[hidden]
        batch["attention_mask"][hidden.nonzero().flatten(), begins - 1] = 0
        return batch


def drop_them_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels after padding are dropped without a word, as they were."""
    for module in ("trl_padfix.core.patches.heads", "trl_padfix.trainers.data.batch_rows"):
        monkeypatch.setattr(f"{module}.follow_padding", lambda labels, mask: False)


SETTINGS = {"per_device_train_batch_size": 4, "max_steps": 3}
CELLS = [
    ("SFT", Cloned(), {}, {"max_length": None, "eval_dataset": build_rows(8, 1), "eval_strategy": "steps"}),
    ("DPO", HidesSome(pad_token_id=PAD), {"prefix_sharing": True, "parity_check": False}, {}),
    ("DPO", HidesSome(pad_token_id=PAD), {"prefix_sharing": True, "max_tokens_per_batch": 64}, {"loss_type": ["aot"]}),
]


@pytest.mark.parametrize(("kind", "collator", "mode", "config"), CELLS)
def test_figures_of_labels_behind_padding_are_trls(kind, collator, mode, config, tmp_path, monkeypatch):
    given = SETTINGS | config | {"data_collator": collator}
    theirs = trained(make_trainer(trl, kind, tmp_path, **given))
    ours = make_trainer(trl_padfix, kind, tmp_path, padding_free=True, **given | mode)
    assert_same(trained(ours), theirs)
    assert ours.padding.stats.padded_forwards >= 1
    assert (ours.padding.stats.forwards > 0) == (kind == "DPO")
    if kind == "SFT":  # the control; the check of the step would see them
        drop_them_silently(monkeypatch)
        unchecked = given | {"parity_check": False}
        assert_other(trained(make_trainer(trl_padfix, kind, tmp_path, padding_free=True, **unchecked)), theirs)
