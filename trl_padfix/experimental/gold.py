"""GOLD without padding, in the forwards of student and teacher."""

from ..trainers.config import TeacherAttentionConfig
from .tasks import MessagesTask, without_padding


__all__ = ["GOLDConfig", "GOLDTrainer"]

GOLDConfig, GOLDTrainer = without_padding("gold", "GOLD", MessagesTask, TeacherAttentionConfig)
