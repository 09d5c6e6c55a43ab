"""SDPO without padding, in the forwards of student and teacher."""

from ..trainers.config import AttentionConfig
from .tasks import PromptTask, without_padding


__all__ = ["SDPOConfig", "SDPOTrainer"]

SDPOConfig, SDPOTrainer = without_padding("sdpo", "SDPO", PromptTask, AttentionConfig)
