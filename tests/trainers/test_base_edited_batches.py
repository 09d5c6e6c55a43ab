"""A batch that is edited between its collator and the loss: TRL's figures for what it holds then."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trl
from kit.cells import every_pair, every_second, slow_but
from kit.loss_watchers import before_loss
from kit.methods import DEFAULTS, make_trainer
from kit.trainer_runs import break_mode, trained

import trl_padfix


Batch = dict[str, Any]

MODES = {"padding-free": {}, "prefix sharing": {"prefix_sharing": True}}
KINDS = ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO")


# -- edits


def noised(ids: torch.Tensor, mask: torch.Tensor, salt: torch.Tensor) -> torch.Tensor:
    """Every third real token is another one, in each row others."""
    shifted = torch.arange(ids.shape[1]) + salt
    return torch.where((mask == 1) & (shifted % 3 == 0), (ids + salt) % 37 + 2, ids)


def with_new_tensors(batch: Batch, write: Callable[[Batch, str, torch.Tensor], None] = dict.__setitem__) -> None:
    def mask_of(name: str) -> torch.Tensor:
        return batch[name.replace("input_ids", "attention_mask").replace("_ids", "_mask")]

    completions = "completion_ids" if "completion_ids" in batch else "input_ids"
    salt = (batch[completions] * mask_of(completions)).sum(1, keepdim=True) % 31 + 1
    for name in [n for n in batch if n.endswith(("input_ids", "prompt_ids"))]:
        write(batch, name, noised(batch[name], mask_of(name), salt))


def in_place(batch: Batch) -> None:
    with_new_tensors(batch, lambda batch, name, new: batch[name].copy_(new))


def through_data(batch: Batch) -> None:
    with_new_tensors(batch, lambda batch, name, new: batch[name].data.copy_(new))


def permuted(batch: Batch, write: Callable[[Batch, str, torch.Tensor], None] = dict.__setitem__) -> None:
    """Rows in another order, pairs as pairs."""
    rows = {name: len(value) for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    count = next(n for name, n in rows.items() if name.endswith(("input_ids", "prompt_ids")))
    half = count // 2
    order = torch.cat([part.roll(1) for part in torch.arange(count).split(half)])
    for name in [name for name, n in rows.items() if n == count]:
        write(batch, name, batch[name][order])


def permuted_through_data(batch: Batch) -> None:
    permuted(batch, lambda batch, name, new: batch[name].data.copy_(new))


EDITS = {edit.__name__: edit for edit in (with_new_tensors, in_place, through_data, permuted, permuted_through_data)}


# -- trainings with an edit


def edited(trainer_class: type, hook: str, edit: Callable[[Batch], None]) -> type:
    """A user's subclass that edits what one of its hooks is given."""

    def wrapped(self: Any, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        edit(inputs)
        return getattr(super(made, self), hook)(model, inputs, *args, **kwargs)

    made = type("Edited", (trainer_class,), {hook: wrapped})
    return made


def figures(package: Any, kind: str, path: Any, hook: str, edit: str, **config: Any) -> list[dict[str, float]]:
    """What two steps and an evaluation log."""
    rows = {name: DEFAULTS[kind][name]() for name in ("train_dataset", "eval_dataset")}
    given = {name: data.select(range(n)) for (name, data), n in zip(rows.items(), (8, 4), strict=True)}
    if kind in ("GRPO", "RLOO"):
        del given["eval_dataset"]
    else:
        given |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    trainer_class, splits = getattr(package, f"{kind}Trainer"), "max_tokens_per_batch" in config
    trainer_class = trainer_class if splits else edited(trainer_class, hook, EDITS[edit])
    trainer = make_trainer(package, kind, path, trainer_class, max_steps=2, **given, **config)
    if splits:  # a loss of a subclass would see all rows of a step at once
        before_loss(trainer, EDITS[edit])
    trained(trainer)
    names = ("loss", "grad_norm", "eval_loss", "rewards/chosen", "eval_rewards/chosen")
    return [{name: log[name] for name in names if name in log} for log in trainer.state.log_history]


@pytest.fixture(scope="module")
def trls(tmp_path_factory):
    @functools.cache
    def of(kind: str, hook: str, edit: str) -> list[dict[str, float]]:
        return figures(trl, kind, tmp_path_factory.mktemp("trl"), hook, edit)

    return of


@pytest.mark.parametrize(("kind", "edit", "mode"), every_second(every_pair(KINDS, EDITS, MODES)))
def test_an_edited_batch_gives_trls_figures(kind, edit, mode, tmp_path, trls):
    check(kind, "compute_loss", edit, mode, tmp_path, trls)


HOOKS = ("training_step", "prediction_step")
OTHER_HOOKS = [(kind, edit, hook) for kind in ("DPO", "SFT", "Reward", "KTO") for edit in EDITS for hook in HOOKS]


@pytest.mark.parametrize(("kind", "edit", "hook"), slow_but(OTHER_HOOKS[:10], OTHER_HOOKS))
def test_so_do_edits_in_other_hooks(kind, edit, hook, tmp_path, trls):
    check(kind, hook, edit, "prefix sharing", tmp_path, trls)


def check(kind: str, hook: str, edit: str, mode: str, path: Any, trls: Any) -> None:
    config = {"padding_free": True, "parity_check": False} | MODES[mode]
    ours, theirs = figures(trl_padfix, kind, path, hook, edit, **config), trls(kind, hook, edit)
    assert len(ours) == len(theirs) > 2
    for own, reference in zip(ours, theirs, strict=True):
        assert own == pytest.approx(reference, rel=1e-4, abs=1e-5)


BUDGETED = [(kind, edit) for kind in KINDS for edit in EDITS]
FAST = [("DPO", "in_place"), ("SFT", "through_data"), ("SFT", "with_new_tensors"), ("KTO", "permuted")]


@pytest.mark.parametrize(("kind", "edit"), slow_but(FAST, BUDGETED))
def test_so_do_edited_micro_batches_that_share_prefixes(kind, edit, tmp_path, trls, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.layout.shared_prefixes.MIN_SAVED_TOKENS", 1)
    config = {"padding_free": True, "prefix_sharing": True, "parity_check": False, "max_tokens_per_batch": 40}
    config |= {} if kind in ("GRPO", "RLOO") else {"max_length": 30}
    ours = figures(trl_padfix, kind, tmp_path, "compute_loss", edit, **config)
    for own, reference in zip(ours, trls(kind, "compute_loss", edit), strict=True):
        assert own == pytest.approx(reference, rel=1e-4, abs=1e-5)


def test_a_wrong_layout_gives_other_figures(tmp_path, trls, monkeypatch):
    """The negative control."""
    config = {"padding_free": True, "parity_check": False} | break_mode(monkeypatch, "prefix sharing")
    ours = figures(trl_padfix, "DPO", tmp_path, "compute_loss", "with_new_tensors", **config)
    theirs = trls("DPO", "compute_loss", "with_new_tensors")
    assert ours[0]["grad_norm"] != pytest.approx(theirs[0]["grad_norm"], rel=1e-3)
