"""Attributes that have another value until the end of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


__all__ = ["temporarily_set"]


@contextlib.contextmanager
def temporarily_set(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` until the block ends, except those that it does not have; `None` has none."""
    values = {name: value for name, value in values.items() if hasattr(owner, name)}
    saved = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in saved:
                setattr(owner, name, saved[name])
            else:
                delattr(owner, name)
