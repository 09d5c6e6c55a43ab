"""SDPO without padding, in the forwards of student and teacher."""

from dataclasses import dataclass

from ..trainers.base import PaddingFreeMixin
from ..trainers.settings import AttentionConfig, PackingConfig
from . import of_trl
from .tasks import PromptTask


with of_trl("sdpo"):
    import trl.experimental.sdpo as trl_sdpo

__all__ = ["SDPOConfig", "SDPOTrainer"]


@dataclass
class SDPOConfig(AttentionConfig, PackingConfig, trl_sdpo.SDPOConfig):
    """TRL's [`~trl.experimental.sdpo.SDPOConfig`] with padding removal."""


class SDPOTrainer(PaddingFreeMixin, trl_sdpo.SDPOTrainer):
    """TRL's [`~trl.experimental.sdpo.SDPOTrainer`] without padding."""

    task_class = PromptTask
