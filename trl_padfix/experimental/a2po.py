"""A*-PO without padding, in the forwards that score completions."""

from ..trainers.config import ReferenceAttentionConfig
from .tasks import PromptTask, without_padding


__all__ = ["A2POConfig", "A2POTrainer"]

A2POConfig, A2POTrainer = without_padding("a2po", "A2PO", PromptTask, ReferenceAttentionConfig)
