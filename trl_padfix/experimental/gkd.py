"""GKD without padding, in the forwards of student and teacher."""

from dataclasses import dataclass

from ..trainers.settings import ForwardBudgetConfig, PackingConfig, TeacherAttentionConfig
from . import of_trl
from .tasks import ExperimentalTrainer, MessagesTask


with of_trl("gkd"):
    import trl.experimental.gkd as trl_gkd

__all__ = ["GKDConfig", "GKDTrainer"]


@dataclass
class GKDConfig(TeacherAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_gkd.GKDConfig):
    """TRL's [`~trl.experimental.gkd.GKDConfig`] with padding removal."""


class GKDTrainer(ExperimentalTrainer, trl_gkd.GKDTrainer):
    """TRL's [`~trl.experimental.gkd.GKDTrainer`] without padding."""

    task_class = MessagesTask
