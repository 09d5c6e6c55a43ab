"""GMPO without padding; all that [`GRPOTrainer`] does."""

from ..trainers.config import ReferenceAttentionConfig
from ..trainers.grpo import GRPOTask
from ..trainers.online import OnlineTrainer
from ..trainers.steps.config import OnlineBudgetConfig
from .tasks import without_padding


__all__ = ["GMPOConfig", "GMPOTrainer"]

GMPOConfig, GMPOTrainer = without_padding(
    "gmpo", "GMPO", GRPOTask, ReferenceAttentionConfig, OnlineBudgetConfig, mixin=OnlineTrainer
)
