"""
Waits of the host that a step of this package causes, counted on the simulated device.

Layouts cost one wait for each batch of rows, whatever the number of forwards on it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.methods import DEFAULTS, make_trainer
from simulated_gpu.simulated_steps import on_simulated, place_models, step, waits_and_losses

import trl_padfix


def make(kind: str, tmp_path, package: Any = trl_padfix, **given: Any) -> Any:
    given = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 3} | given
    given = {name: DEFAULTS[kind][name]() for name in ("train_dataset", "eval_dataset")} | given
    return make_trainer(
        package, kind, tmp_path / "run", **({"padding_free": True} if package is trl_padfix else {}) | given
    )


def first_batch(trainer: Any, loader: str = "train") -> dict[str, torch.Tensor]:
    """The first batch, on the device; a step has been run on it, with the comparison of the first batch."""
    batch = on_simulated(next(iter(getattr(trainer, f"get_{loader}_dataloader")())))
    place_models(trainer)
    step(trainer, batch, training=loader == "train")
    return batch


def waits_of_step(gpu: Any, trainer: Any, loader: str = "train") -> int:
    batch = first_batch(trainer, loader)
    (waits,), _ = waits_and_losses(gpu, trainer, batch, training=loader == "train")
    assert gpu.varlen  # the kernel of packed rows
    return sum(waits.values())


PACKING = {"packing": True, "max_length": 32, "eval_packing": False}


@pytest.mark.parametrize(
    ("kind", "config", "waits", "sharing"),
    [
        # Labels that TRL makes of completion masks for a forward are read by themselves: in KTO for policy and
        # reference, and for mismatched completions.
        ("KTO", {}, 4, False),
        ("DPO", {}, 2, True),  # policy and reference have the same labels
        ("SFT", PACKING, 2, False),  # labels of rows that arrive packed are read by themselves
        ("SFT", {"padding_side": "left", "dataloader_num_workers": 1}, 1, True),
    ],
)
def test_a_step_waits_once_for_its_batch(kind, config, waits, sharing, gpu, tmp_path):
    assert waits_of_step(gpu, make(kind, tmp_path, prefix_sharing=sharing, **config)) == waits


def test_each_step_of_a_generation_waits_once(gpu, tmp_path):
    trainer = make("GRPO", tmp_path, prefix_sharing=True, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2  # `train` sets it
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    place_models(trainer)
    batches = [on_simulated(batch) for batch in trainer._buffered_inputs]
    step(trainer, batches[0])
    waits, _ = waits_and_losses(gpu, trainer, *batches)
    assert [sum(w.values()) for w in waits] == [1, 1]
