"""Online DPO without padding, in the forwards of both models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..trainers.settings import ForwardBudgetConfig, PackingConfig, ReferenceAttentionConfig
from . import of_trl
from .tasks import ExperimentalTrainer, PromptTask


with of_trl("online_dpo"):
    import trl.experimental.online_dpo as trl_online_dpo


if TYPE_CHECKING:
    import torch


__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]


@dataclass
class OnlineDPOConfig(ReferenceAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_online_dpo.OnlineDPOConfig):
    """TRL's [`~trl.experimental.online_dpo.OnlineDPOConfig`] with padding removal."""


class OnlineDPOTrainer(ExperimentalTrainer, trl_online_dpo.OnlineDPOTrainer):
    """TRL's [`~trl.experimental.online_dpo.OnlineDPOTrainer`] without padding."""

    task_class = PromptTask

    def _forward(self, model: "torch.nn.Module", *args: Any, **kwargs: Any) -> Any:
        if model is self.ref_model:
            with self.split_forwards():
                return super()._forward(model, *args, **kwargs)
        with self.observe_step(model, {}):  # TRL takes the loss of the policy's forwards within `training_step`
            return super()._forward(model, *args, **kwargs)
