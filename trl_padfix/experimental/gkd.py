"""GKD without padding, in the forwards of student and teacher."""

from dataclasses import dataclass
from typing import Any

from ..trainers.context_parallel import ContextParallel
from ..trainers.settings import ForwardBudgetConfig, PackingConfig, TeacherAttentionConfig
from . import of_trl
from .tasks import GeneratingTrainer, MessagesTask


with of_trl("gkd"):
    import trl.experimental.gkd as trl_gkd

__all__ = ["GKDConfig", "GKDTrainer"]


@dataclass
class GKDConfig(TeacherAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_gkd.GKDConfig):
    """TRL's [`~trl.experimental.gkd.GKDConfig`] with padding removal."""


class GKDTrainer(GeneratingTrainer, trl_gkd.GKDTrainer):
    """TRL's [`~trl.experimental.gkd.GKDTrainer`] without padding."""

    task_class = MessagesTask

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.padding.part(ContextParallel).drawing_alike():  # GKD draws whether to generate, then tokens
            return super().training_step(*args, **kwargs)
