"""Attributes that have another value until the end of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


__all__ = ["set_until_closed", "temporarily_set"]


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


def set_until_closed(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of `owner` until `stack` closes. A value that other code has set since then stays."""
    saved = {name: vars(owner)[name]} if name in vars(owner) else {}

    def undo() -> None:
        if vars(owner).get(name) is value:
            delattr(owner, name)
            vars(owner).update(saved)

    stack.callback(undo)
    setattr(owner, name, value)
