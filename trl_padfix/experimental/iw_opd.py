"""IW-OPD without padding, in the forwards of student and teacher."""

from ..trainers.config import TeacherAttentionConfig
from .tasks import MessagesTask, without_padding


__all__ = ["IWOPDConfig", "IWOPDTrainer"]

IWOPDConfig, IWOPDTrainer = without_padding("iw_opd", "IWOPD", MessagesTask, TeacherAttentionConfig)
