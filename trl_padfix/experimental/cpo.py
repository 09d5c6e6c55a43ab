"""CPO (and SimPO) without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..trainers.base import PaddingFreeMixin
from ..trainers.config import AttentionConfig, PackingConfig
from . import of_trl
from .tasks import PairTask


with of_trl("cpo"):
    import trl.experimental.cpo as trl_cpo

__all__ = ["CPOConfig", "CPOTrainer"]


@dataclass
class CPOConfig(AttentionConfig, PackingConfig, trl_cpo.CPOConfig):
    """TRL's [`~trl.experimental.cpo.CPOConfig`] with padding removal."""


class CPOTrainer(PaddingFreeMixin, trl_cpo.CPOTrainer):
    """TRL's [`~trl.experimental.cpo.CPOTrainer`] without padding; rows are padded right, as in TRL."""

    task_class = PairTask

    def get_batch_loss_metrics(self, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.observe_step(model, batch):  # TRL's evaluation does not go through `compute_loss`
            return super().get_batch_loss_metrics(model, batch, *args, **kwargs)
