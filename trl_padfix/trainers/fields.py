"""Fields that are set for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


__all__ = ["field_set"]


@contextlib.contextmanager
def field_set(config: Any, name: str, value: Any) -> Iterator[None]:
    """`config.name` set to `value` until the block ends; nothing where there is no config."""
    if config is None or not hasattr(config, name):
        yield
        return
    saved = getattr(config, name)
    setattr(config, name, value)
    try:
        yield
    finally:
        setattr(config, name, saved)
