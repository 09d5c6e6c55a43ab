"""Online DPO without padding, in the forwards of both models."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..trainers.context_parallel import ContextParallel
from ..trainers.settings import ForwardBudgetConfig, PackingConfig, ReferenceAttentionConfig
from . import of_trl
from .tasks import GeneratingTrainer, PromptTask


with of_trl("online_dpo"):
    import trl.experimental.online_dpo as trl_online_dpo


if TYPE_CHECKING:
    import torch


__all__ = ["OnlineDPOConfig", "OnlineDPOTrainer"]


@dataclass
class OnlineDPOConfig(ReferenceAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_online_dpo.OnlineDPOConfig):
    """TRL's [`~trl.experimental.online_dpo.OnlineDPOConfig`] with padding removal."""


class OnlineDPOTrainer(GeneratingTrainer, trl_online_dpo.OnlineDPOTrainer):
    """TRL's [`~trl.experimental.online_dpo.OnlineDPOTrainer`] without padding."""

    task_class = PromptTask

    def _generate(self, model: "torch.nn.Module", prompts: list[object], *args: object, **kwargs: object) -> Any:
        with self.padding.part(ContextParallel).generating({"prompt": prompts}):
            return super()._generate(model, prompts, *args, **kwargs)

    def _calculate_rewards_from_functions(self, *args: object, **kwargs: object) -> Any:
        rewards = super()._calculate_rewards_from_functions(*args, **kwargs)
        return self.padding.part(ContextParallel).broadcast_from_first(rewards)

    def _forward(self, model: "torch.nn.Module", *args: Any, **kwargs: Any) -> Any:
        if model is self.ref_model:
            with self.split_forwards():
                return super()._forward(model, *args, **kwargs)
        with self.observe_step(model, {}):  # TRL takes the loss of the policy's forwards within `training_step`
            return super()._forward(model, *args, **kwargs)
