"""SDPO without padding, in the forwards of student and teacher."""

from dataclasses import dataclass

from ..trainers.settings import AttentionConfig, ForwardBudgetConfig, PackingConfig
from . import of_trl
from .tasks import PromptTask, SelfDistillingTrainer


with of_trl("sdpo"):
    import trl.experimental.sdpo as trl_sdpo

__all__ = ["SDPOConfig", "SDPOTrainer"]


@dataclass
class SDPOConfig(AttentionConfig, ForwardBudgetConfig, PackingConfig, trl_sdpo.SDPOConfig):
    """TRL's [`~trl.experimental.sdpo.SDPOConfig`] with padding removal."""


class SDPOTrainer(SelfDistillingTrainer, trl_sdpo.SDPOTrainer):
    """TRL's [`~trl.experimental.sdpo.SDPOTrainer`] without padding."""

    task_class = PromptTask
