"""TRL's trainers without padding: one mixin over TRL's classes, a module for each trainer."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..versions import require


def __getattr__(name: str) -> Any:
    # Imported when asked for: not every TRL has all of them.
    module = name.removesuffix("Trainer").lower()
    if not name.endswith("Trainer") or find_spec(f"{__name__}.{module}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers", name)
    require("trl", name)
    return getattr(import_module(f".{module}", __name__), name)
