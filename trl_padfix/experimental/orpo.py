"""ORPO without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..trainers.base import PaddingFreeMixin
from ..trainers.config import AttentionConfig, PackingConfig
from . import of_trl
from .tasks import PairTask


with of_trl("orpo"):
    import trl.experimental.orpo as trl_orpo

__all__ = ["ORPOConfig", "ORPOTrainer"]


@dataclass
class ORPOConfig(AttentionConfig, PackingConfig, trl_orpo.ORPOConfig):
    """TRL's [`~trl.experimental.orpo.ORPOConfig`] with padding removal."""


class ORPOTrainer(PaddingFreeMixin, trl_orpo.ORPOTrainer):
    """TRL's [`~trl.experimental.orpo.ORPOTrainer`] without padding; rows are padded right, as in TRL."""

    task_class = PairTask

    def get_batch_loss_metrics(self, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.observe_step(model, batch):  # TRL's evaluation does not go through `compute_loss`
            return super().get_batch_loss_metrics(model, batch, *args, **kwargs)
