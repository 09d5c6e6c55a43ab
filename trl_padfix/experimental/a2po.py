"""A*-PO without padding, in the forwards that score completions."""

from dataclasses import dataclass
from typing import Any

from ..trainers.settings import ForwardBudgetConfig, PackingConfig, ReferenceAttentionConfig
from . import of_trl
from .tasks import ExperimentalTrainer, PromptTask


with of_trl("a2po"):
    import trl.experimental.a2po as trl_a2po

__all__ = ["A2POConfig", "A2POTrainer"]


@dataclass
class A2POConfig(ReferenceAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_a2po.A2POConfig):
    """TRL's [`~trl.experimental.a2po.A2POConfig`] with padding removal."""


class A2POTrainer(ExperimentalTrainer, trl_a2po.A2POTrainer):
    """TRL's [`~trl.experimental.a2po.A2POTrainer`] without padding."""

    task_class = PromptTask

    def _get_sequence_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forwards():
            return super()._get_sequence_logps(*args, **kwargs)
