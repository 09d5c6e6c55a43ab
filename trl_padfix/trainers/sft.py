"""SFT without padding."""

from __future__ import annotations

import trl

from .generating import GeneratingMixin
from .mixin import PaddingRemovalMixin


__all__ = ["SFTTrainer"]


class SFTTrainer(GeneratingMixin, PaddingRemovalMixin, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] without padding.

    Args:
        *args, **kwargs:
            As [`~trl.SFTTrainer`]. `args` may be this package's [`SFTConfig`] or TRL's.
    """
