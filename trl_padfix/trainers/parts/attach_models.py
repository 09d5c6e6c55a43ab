"""Attaches to the models of any trainer: policy, and reference or teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...core.handle import PaddingRemoval
from ..distributed import check_launch, is_sharded, models_of, refuse_whole_rows, warn_of_launch


if TYPE_CHECKING:
    from .part import PaddingFreeTrainer


__all__ = ["attach_to_models"]


def attach_to_models(
    trainer: PaddingFreeTrainer,
    attach: Callable[[torch.nn.Module], PaddingRemoval],
    models: Sequence[torch.nn.Module] | None = None,
) -> None:
    """
    Attach to each model of a trainer, the policy first.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer.
        attach (`Callable`):
            Removes padding from a model, and keeps the handle: a later check may fail, and the caller then detaches.
        models (`list`, *optional*):
            Some of the trainer's models; by default all.

    Raises:
        ValueError, TypeError, PaddingRemovalError: For a launch or a model that cannot be packed.
    """
    check_launch(trainer)
    warn_of_launch(trainer.accelerator)
    for model in models_of(trainer) if models is None else models:
        handle = attach(model)
        if is_sharded(trainer):
            refuse_whole_rows(handle)
