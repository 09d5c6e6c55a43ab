"""Attributes that have another value until the end of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


__all__ = ["temporarily_set"]


@contextlib.contextmanager
def temporarily_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` until the block ends; nothing happens if it is `None` or has no such attribute."""
    if owner is None or not hasattr(owner, name):
        yield
        return
    is_own, saved = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, saved)
        else:
            delattr(owner, name)
