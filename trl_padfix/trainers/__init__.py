"""TRL's trainers without padding: one mixin over TRL's classes, a module for each trainer."""

from __future__ import annotations

from typing import Any

import trl_padfix


_TRAINERS = ["DPOTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer", "SFTTrainer"]


def __getattr__(name: str) -> Any:
    # One at a time: not every TRL has all of them.
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(trl_padfix, name)
