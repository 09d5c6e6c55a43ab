"""SFT without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl

from .budget import BudgetMixin, TextMeasure
from .mixin import PaddingRemovalMixin


__all__ = ["SFTTrainer"]


class SFTTrainer(BudgetMixin, PaddingRemovalMixin, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] without padding.

    Args:
        *args, **kwargs:
            As [`~trl.SFTTrainer`]. `args` may be this package's [`SFTConfig`] or TRL's.
    """

    def _not_a_mean_over_rows(self) -> str | None:
        if self.accelerator.num_processes > 1 and not self.args.average_tokens_across_devices:
            return "With `average_tokens_across_devices=False` the tokens of a process with few of them weigh more"
        return super()._not_a_mean_over_rows()

    def _measure(self) -> TextMeasure:
        return TextMeasure(self.args.max_length)

    def _batch_size_of(self, batch: dict[str, Any]) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def _metric_sizes(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {}
