"""SFT without padding."""

from __future__ import annotations

import trl

from .attention import AttentionChoiceMixin
from .generating import GeneratingMixin
from .mixin import PaddingRemovalMixin


__all__ = ["SFTTrainer"]


class SFTTrainer(AttentionChoiceMixin, GeneratingMixin, PaddingRemovalMixin, trl.SFTTrainer):
    """
    TRL's [`~trl.SFTTrainer`] without padding.

    With `predict_with_generate=True` every evaluation also continues the prompts, as in [`DPOTrainer`]; the references
    are the completions, or the last messages of the assistant.

    Args:
        *args, **kwargs:
            As [`~trl.SFTTrainer`]. `args` may be this package's [`SFTConfig`] or TRL's.
    """
