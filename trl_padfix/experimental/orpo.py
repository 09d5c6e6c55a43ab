"""ORPO without padding; rows are padded right, as in TRL."""

from ..trainers.config import AttentionConfig
from .tasks import PairTask, PairTrainer, without_padding


__all__ = ["ORPOConfig", "ORPOTrainer"]

ORPOConfig, ORPOTrainer = without_padding("orpo", "ORPO", PairTask, AttentionConfig, mixin=PairTrainer)
