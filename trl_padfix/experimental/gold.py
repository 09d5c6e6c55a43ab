"""GOLD without padding, in the forwards of student and teacher."""

from dataclasses import dataclass

from ..trainers.settings import ForwardBudgetConfig, PackingConfig, TeacherAttentionConfig
from . import of_trl
from .tasks import ExperimentalTrainer, MessagesTask


with of_trl("gold"):
    import trl.experimental.gold as trl_gold

__all__ = ["GOLDConfig", "GOLDTrainer"]


@dataclass
class GOLDConfig(TeacherAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_gold.GOLDConfig):
    """TRL's [`~trl.experimental.gold.GOLDConfig`] with padding removal."""


class GOLDTrainer(ExperimentalTrainer, trl_gold.GOLDTrainer):
    """TRL's [`~trl.experimental.gold.GOLDTrainer`] without padding."""

    task_class = MessagesTask
