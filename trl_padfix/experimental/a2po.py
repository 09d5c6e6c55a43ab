"""A*-PO without padding, in the forwards that score completions."""

from dataclasses import dataclass
from typing import Any

from ..trainers.context_parallel import ContextParallel
from ..trainers.settings import ForwardBudgetConfig, PackingConfig, ReferenceAttentionConfig
from . import of_trl
from .tasks import GeneratingTrainer, PromptTask


with of_trl("a2po"):
    import trl.experimental.a2po as trl_a2po

__all__ = ["A2POConfig", "A2POTrainer"]


@dataclass
class A2POConfig(ReferenceAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_a2po.A2POConfig):
    """TRL's [`~trl.experimental.a2po.A2POConfig`] with padding removal."""


class A2POTrainer(GeneratingTrainer, trl_a2po.A2POTrainer):
    """TRL's [`~trl.experimental.a2po.A2POTrainer`] without padding."""

    task_class = PromptTask

    def _estimate_optimal_values(self) -> None:
        with self.padding.part(ContextParallel).drawing_alike():
            super()._estimate_optimal_values()

    def _calculate_rewards(self, *args: object, **kwargs: object) -> Any:
        return self.padding.part(ContextParallel).broadcast_from_first(super()._calculate_rewards(*args, **kwargs))

    def _get_sequence_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forwards():
            return super()._get_sequence_logps(*args, **kwargs)
