"""Online DPO without padding, in the forwards of both models."""

from __future__ import annotations

from typing import Any

from ..trainers.base import PaddingFreeMixin
from ..trainers.config import ReferenceAttentionConfig
from .tasks import PromptTask, without_padding


__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]


class _Observed(PaddingFreeMixin):
    """Observes the forwards of the policy, of which TRL takes the loss within `training_step`."""

    def _forward(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is self.ref_model:
            return super()._forward(model, *args, **kwargs)
        with self.observe_step(model, {}):
            return super()._forward(model, *args, **kwargs)


OnlineDPOConfig, OnlineDPOTrainer = without_padding(
    "online_dpo", "OnlineDPO", PromptTask, ReferenceAttentionConfig, mixin=_Observed
)
