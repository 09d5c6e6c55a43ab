"""SDFT without padding, in the forwards of student and teacher."""

from dataclasses import dataclass

from ..trainers.base import PaddingFreeMixin
from ..trainers.settings import AttentionConfig, PackingConfig
from . import of_trl
from .tasks import PromptTask


with of_trl("sdft"):
    import trl.experimental.sdft as trl_sdft

__all__ = ["SDFTConfig", "SDFTTrainer"]


@dataclass
class SDFTConfig(AttentionConfig, PackingConfig, trl_sdft.SDFTConfig):
    """TRL's [`~trl.experimental.sdft.SDFTConfig`] with padding removal."""


class SDFTTrainer(PaddingFreeMixin, trl_sdft.SDFTTrainer):
    """TRL's [`~trl.experimental.sdft.SDFTTrainer`] without padding."""

    task_class = PromptTask
