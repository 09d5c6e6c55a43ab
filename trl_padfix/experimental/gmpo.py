"""GMPO without padding, with all features of [`GRPOTrainer`]."""

from dataclasses import dataclass

from ..trainers.grpo import GRPOTask
from ..trainers.online import OnlineTrainer
from ..trainers.settings import OnlineBudgetConfig, PackingConfig, ReferenceAttentionConfig
from . import of_trl


with of_trl("gmpo"):
    import trl.experimental.gmpo as trl_gmpo

__all__ = ["GMPOConfig", "GMPOTrainer"]


@dataclass
class GMPOConfig(ReferenceAttentionConfig, OnlineBudgetConfig, PackingConfig, trl_gmpo.GMPOConfig):
    """TRL's [`~trl.experimental.gmpo.GMPOConfig`] with padding removal."""


class GMPOTrainer(OnlineTrainer, trl_gmpo.GMPOTrainer):
    """TRL's [`~trl.experimental.gmpo.GMPOTrainer`] without padding."""

    task_class = GRPOTask
