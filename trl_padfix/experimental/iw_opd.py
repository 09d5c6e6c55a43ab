"""IW-OPD without padding, in the forwards of student and teacher."""

from dataclasses import dataclass

from ..trainers.settings import ForwardBudgetConfig, PackingConfig, TeacherAttentionConfig
from . import of_trl
from .tasks import ExperimentalTrainer, MessagesTask


with of_trl("iw_opd"):
    import trl.experimental.iw_opd as trl_iw_opd

__all__ = ["IWOPDConfig", "IWOPDTrainer"]


@dataclass
class IWOPDConfig(TeacherAttentionConfig, ForwardBudgetConfig, PackingConfig, trl_iw_opd.IWOPDConfig):
    """TRL's [`~trl.experimental.iw_opd.IWOPDConfig`] with padding removal."""


class IWOPDTrainer(ExperimentalTrainer, trl_iw_opd.IWOPDTrainer):
    """TRL's [`~trl.experimental.iw_opd.IWOPDTrainer`] without padding."""

    task_class = MessagesTask
