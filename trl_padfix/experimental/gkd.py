"""GKD without padding, in the forwards of student and teacher."""

from ..trainers.config import TeacherAttentionConfig
from .tasks import MessagesTask, without_padding


__all__ = ["GKDConfig", "GKDTrainer"]

GKDConfig, GKDTrainer = without_padding("gkd", "GKD", MessagesTask, TeacherAttentionConfig)
