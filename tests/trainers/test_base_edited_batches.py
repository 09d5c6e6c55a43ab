"""
A batch that is edited between its collator and the loss: TRL's figures for what it holds then.

Layouts are kept for the other forwards of the very same tensors; what could go wrong is that one is taken for a batch
that was written to since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trl
from kit.loss_watchers import before_loss
from kit.methods import make_trainer
from kit.trainer_runs import assert_other, assert_same, break_mode, trained

import trl_padfix


Batch = dict[str, Any]


def noised(batch: Batch, name: str) -> torch.Tensor:
    """Every third real token is another one, in each row others."""
    ids, mask = batch[name], batch[name.replace("input_ids", "attention_mask").replace("_ids", "_mask")]
    salt = (ids * mask).sum(1, keepdim=True) % 31 + 1
    return torch.where((mask == 1) & ((torch.arange(ids.shape[1]) + salt) % 3 == 0), (ids + salt) % 37 + 2, ids)


def with_new_tensors(batch: Batch, write: Callable[[Batch, str, torch.Tensor], Any] = dict.__setitem__) -> None:
    for name in [n for n in batch if n.endswith(("input_ids", "prompt_ids"))]:
        write(batch, name, noised(batch, name))


def in_place(batch: Batch) -> None:
    with_new_tensors(batch, lambda batch, name, new: batch[name].copy_(new))


def through_data(batch: Batch) -> None:
    """Without a new version of the tensor."""
    with_new_tensors(batch, lambda batch, name, new: batch[name].data.copy_(new))


def of_next_step(trainer: Any, edit: Callable[[Batch], None]) -> None:
    """Let a user's step edit its batch, the same object in each step, after it was computed once."""
    step, kept = trainer.training_step, {}

    def training_step(model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        kept.update(kept or inputs)
        edit(kept)
        return step(model, kept, *args, **kwargs)

    trainer.training_step = training_step


CELLS = [
    ("DPO", before_loss, with_new_tensors, {}),
    ("DPO", of_next_step, in_place, {"prefix_sharing": True}),
    ("SFT", of_next_step, in_place, {}),
    ("Reward", before_loss, through_data, {"prefix_sharing": True}),
    ("KTO", before_loss, in_place, {"prefix_sharing": True, "max_tokens_per_batch": 40, "max_length": 30}),
    ("GRPO", before_loss, in_place, {"prefix_sharing": True}),
]


def figures(library: Any, kind: str, path: Any, when: Any, edit: Any, **config: Any) -> torch.Tensor:
    rows = {} if kind == "GRPO" else {"per_device_train_batch_size": 4}
    trainer = make_trainer(library, kind, path, max_steps=3, **rows, **config)
    when(trainer, edit)
    return trained(trainer)


@pytest.mark.parametrize(("kind", "when", "edit", "mode"), CELLS)
def test_an_edited_batch_gives_trls_figures(kind, when, edit, mode, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.layout.shared_prefixes.MIN_SAVED_TOKENS", 1)
    theirs = figures(trl, kind, tmp_path, when, edit)
    config = {"padding_free": True, "parity_check": False} | mode
    assert_same(figures(trl_padfix, kind, tmp_path, when, edit, **config), theirs)
    break_mode(monkeypatch, "prefix sharing" if "prefix_sharing" in mode else "padding-free")
    assert_other(figures(trl_padfix, kind, tmp_path, when, edit, **config), theirs)
