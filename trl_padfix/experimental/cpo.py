"""CPO (and SimPO) without padding; rows are padded right, as in TRL."""

from ..trainers.config import AttentionConfig
from .tasks import PairTask, PairTrainer, without_padding


__all__ = ["CPOConfig", "CPOTrainer"]

CPOConfig, CPOTrainer = without_padding("cpo", "CPO", PairTask, AttentionConfig, mixin=PairTrainer)
