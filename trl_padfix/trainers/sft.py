"""SFT without padding."""

from __future__ import annotations

import trl

from .attention import AttentionChoiceMixin
from .mixin import PaddingRemovalMixin


__all__ = ["SFTTrainer"]


class SFTTrainer(AttentionChoiceMixin, PaddingRemovalMixin, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] without padding.

    Args:
        *args, **kwargs:
            As [`~trl.SFTTrainer`]. `args` may be this package's [`SFTConfig`] or TRL's.
    """
