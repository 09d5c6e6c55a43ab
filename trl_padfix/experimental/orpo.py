"""ORPO without padding; rows are padded right, as in TRL."""

from dataclasses import dataclass

from ..trainers.settings import AttentionConfig, ForwardBudgetConfig, PackingConfig
from . import of_trl
from .tasks import JoinedPairTask, PairTrainer


with of_trl("orpo"):
    import trl.experimental.orpo as trl_orpo

__all__ = ["ORPOConfig", "ORPOTrainer"]


@dataclass
class ORPOConfig(AttentionConfig, ForwardBudgetConfig, PackingConfig, trl_orpo.ORPOConfig):
    """TRL's [`~trl.experimental.orpo.ORPOConfig`] with padding removal."""


class ORPOTrainer(PairTrainer, trl_orpo.ORPOTrainer):
    """TRL's [`~trl.experimental.orpo.ORPOTrainer`] without padding."""

    task_class = JoinedPairTask
