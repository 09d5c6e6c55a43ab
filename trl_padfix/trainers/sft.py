"""SFT without padding."""

from __future__ import annotations

import trl
import trl.trainer.sft_trainer as trl_sft

from ..vision_collators import DataCollatorForVisionLanguageModeling
from .mixin import PaddingRemovalMixin


__all__ = ["SFTTrainer"]


class SFTTrainer(PaddingRemovalMixin, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] without padding.

    Args:
        *args, **kwargs:
            As [`~trl.SFTTrainer`]. `args` may be this package's [`SFTConfig`] or TRL's.
    """

    _collators = {trl_sft.DataCollatorForVisionLanguageModeling: DataCollatorForVisionLanguageModeling}
