"""Steps of a trainer on the simulated device: a batch as accelerate places it, and a forward and backward on it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any
from unittest import mock

import torch
from simulated_gpu.simulated_cuda import CUDA, to_simulated


__all__ = ["on_simulated", "place_models", "step"]


def on_simulated(value: Any) -> Any:
    """Place a batch, or a part of one, as accelerate does."""
    if isinstance(value, Mapping):
        return {k: on_simulated(v) for k, v in value.items()}
    if isinstance(value, list):
        return [on_simulated(v) for v in value]
    return to_simulated(value) if isinstance(value, torch.Tensor) else value


def place_models(trainer: Any) -> None:
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            to_simulated(model)


def step(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a step under bfloat16 autocast; its gradients go to the parameters."""
    trainer.model.train()
    device = mock.patch.object(type(trainer.accelerator), "device", CUDA)  # some trainers move their batches there
    with device, torch.autocast("cuda", torch.bfloat16):
        loss = trainer.compute_loss(trainer.model, copy(batch))
    loss.backward()
    return loss.detach().cpu()
