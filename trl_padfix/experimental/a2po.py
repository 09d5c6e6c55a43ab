"""A*-PO without padding, in the forwards that score completions."""

from dataclasses import dataclass

from ..trainers.base import PaddingFreeMixin
from ..trainers.settings import PackingConfig, ReferenceAttentionConfig
from . import of_trl
from .tasks import PromptTask


with of_trl("a2po"):
    import trl.experimental.a2po as trl_a2po

__all__ = ["A2POConfig", "A2POTrainer"]


@dataclass
class A2POConfig(ReferenceAttentionConfig, PackingConfig, trl_a2po.A2POConfig):
    """TRL's [`~trl.experimental.a2po.A2POConfig`] with padding removal."""


class A2POTrainer(PaddingFreeMixin, trl_a2po.A2POTrainer):
    """TRL's [`~trl.experimental.a2po.A2POTrainer`] without padding."""

    task_class = PromptTask
