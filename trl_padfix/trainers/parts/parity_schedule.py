"""The batches on which a trainer's step, or its metrics, are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..distributed import on_any_process
from .step_parity import has_padding


__all__ = ["ParitySchedule"]

MOST_ZEROS = 50
"""Most steps without a gradient that are compared: a model may amplify rounding so much that no step has one."""


@dataclass
class ParitySchedule:
    """
    The batches of training, or of evaluation, on which the trainer's step is compared, and the verdicts.

    If a compared batch has no padding, or shows nothing (no gradient, a loss of zero), the step is compared again on
    the next batch with padding. All processes must call each method, which returns the same on all.

    Attributes:
        trainer ([`~transformers.Trainer`]): The trainer.
        is_active (`bool`): Whether the step is compared on a further batch.
        needs_padding (`bool`): Whether the next compared batch must have padding.
        zeros (`int`): The number of compared steps that showed nothing.
    """

    trainer: Any
    is_active: bool
    needs_padding: bool = False
    zeros: int = 0

    def is_due(self, batches: list[dict[str, torch.Tensor]], is_clear: bool = True) -> bool:
        """Whether all processes compare the step on `batches`; `is_clear`: whether it can be compared on this one."""
        # A loss may read padding, which a first batch of equally long rows does not show.
        is_padded = on_any_process(self.trainer, has_padding(batches))
        if self.needs_padding and not is_padded:
            return False
        # Processes are in step: they compare in the first step, or not at all.
        if is_clear or self.trainer.accelerator.num_processes > 1:
            self.is_active, self.needs_padding = not is_padded, True
        return not on_any_process(self.trainer, not is_clear)

    def verdict(self, is_ok: bool, is_zero: bool) -> bool | None:
        """Whether the step is right on all processes; `None` if it is zero on all: then another one is compared."""
        if on_any_process(self.trainer, not is_ok):
            return False
        if on_any_process(self.trainer, not is_zero):
            return True
        self.zeros += 1
        self.is_active = self.zeros < MOST_ZEROS
        return None
