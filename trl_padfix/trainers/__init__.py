"""TRL's trainers without padding: one mixin over TRL's classes, a module for each trainer."""

from __future__ import annotations

from typing import Any

import trl_padfix


def __getattr__(name: str) -> Any:
    # Imported when asked for: not every TRL has all of them.
    if not (name.endswith("Trainer") and name in trl_padfix.__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(trl_padfix, name)
