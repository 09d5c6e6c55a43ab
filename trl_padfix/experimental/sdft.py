"""SDFT without padding, in the forwards of student and teacher."""

from ..trainers.config import AttentionConfig
from .tasks import PromptTask, without_padding


__all__ = ["SDFTConfig", "SDFTTrainer"]

SDFTConfig, SDFTTrainer = without_padding("sdft", "SDFT", PromptTask, AttentionConfig)
