"""
Waits of the host that a step of this package causes, counted on the simulated device.

Layouts cost one wait for each batch of rows, whatever the number of forwards on it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.methods import DEFAULTS, make_trainer
from simulated_gpu.simulated_steps import on_simulated, place_models, step

import trl_padfix
from trl_padfix.trainers.metrics.token_counts import TokenCounts


def make(kind: str, folder: Any, **given: Any) -> Any:
    given |= {"per_device_train_batch_size": 8, "max_steps": 3, "padding_free": True}
    return make_trainer(trl_padfix, kind, folder, train_dataset=DEFAULTS[kind]["train_dataset"](), **given)


def waits_of(gpu: Any, trainer: Any, *batches: Any) -> list[int]:
    """Waits in a step on each of the batches, after one with the comparison of the first batch."""
    place_models(trainer)
    batches = [on_simulated(batch) for batch in batches]
    step(trainer, batches[0])
    waits = []
    for batch in batches:
        gpu.reset()
        step(trainer, batch)
        assert gpu.varlen  # the kernel of packed rows
        waits.append(sum(gpu.ours().values()))
    return waits


PACKING = {"packing": True, "max_length": 32}


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
    trainer = make(kind, tmp_path, prefix_sharing=sharing, **config)
    assert waits_of(gpu, trainer, next(iter(trainer.get_train_dataloader()))) == [waits]


def test_each_step_of_a_generation_waits_once(gpu, tmp_path):
    trainer = make("GRPO", tmp_path, prefix_sharing=True, gradient_accumulation_steps=2)
    trainer.current_gradient_accumulation_steps = 2  # `train` sets it
    trainer.model.train()
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert waits_of(gpu, trainer, *trainer._buffered_inputs) == [1, 1]


def test_token_counts_of_several_processes_are_read_when_they_are_logged(gpu, tmp_path, monkeypatch):
    trainer = make("SFT", tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    waits_of(gpu, trainer, batch)
    counter, accelerator = (
        next(x for x in trainer.padding.parts if isinstance(x, TokenCounts)).counters["train"],
        trainer.accelerator,
    )
    alone = counter.report(trainer.padding.handle)
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    monkeypatch.setattr(type(accelerator), "device", torch.device("cuda:0"))
    monkeypatch.setattr(accelerator, "reduce", lambda counts: counts * 2)
    for name in ("gather", "gather_for_metrics"):
        monkeypatch.setattr(accelerator, name, lambda x: x)
    trainer.state.global_step = 1  # the first step, with the parity check, waits
    assert waits_of(gpu, trainer, batch) == [1]  # for the batch
    gpu.reset()
    assert counter.report(trainer.padding.handle)["padfix/pad_fraction"] == alone["padfix/pad_fraction"]
    assert sum(gpu.ours().values()) == 1
