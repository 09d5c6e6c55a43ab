"""
What is running in this thread, in one context variable.

Calls of several threads, and calls within calls, do not see each other's. Every field is read and set through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


__all__ = ["Context", "context", "outside_calls", "set_until_reset", "within"]


@dataclass(frozen=True)
class Context:
    """What is running, where something is."""

    model: Any = None  # [`ModelCall`]: the call of an attached model
    packed: Any = None  # [`PackedCall`]: the packed forward of a decoder
    rows: Any = None  # [`RowsCall`]: the forward of a decoder over rows
    layer: Any = None  # [`LayerCall`]: the call of a layer within a packed forward
    step: Any = None  # [`Step`]: the step of training or evaluation
    disabled: frozenset[Any] = frozenset()  # attachments that are switched off
    attention: str | None = None  # what padded forwards compute with, if not with what their config names


_NOTHING = Context()
_context: ContextVar[Context] = ContextVar("trl_padfix", default=_NOTHING)


def context() -> Context:
    """What is running."""
    return _context.get()


@contextmanager
def within(**fields: Any) -> Iterator[None]:
    """Fields of the [`Context`] have other values until the block ends."""
    token = _context.set(replace(_context.get(), **fields))
    try:
        yield
    finally:
        _context.reset(token)


def set_until_reset(**fields: Any) -> None:
    """Fields of the [`Context`] have other values until the innermost [`within`] that is running ends."""
    _context.set(replace(_context.get(), **fields))


def outside_calls() -> Any:
    """A block that runs as if no model, decoder or layer were being called."""
    return within(model=None, packed=None, rows=None)
