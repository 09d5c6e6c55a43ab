"""
Values that hold until the end of a block: the calls that run in this thread, and attributes of objects.

The calls are in one context variable. Each thread has its own context, and a nested call sets its own fields. Fields
are read with [`context`], and set with [`within`].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


__all__ = [
    "Context", "checkpoint_state", "context", "in_backward", "in_checkpoint", "of_this_thread",
    "outside_calls", "set_until_closed", "temporarily_set", "within",
]  # fmt: skip


@dataclass(frozen=True)
class Context:
    """
    The running calls, and the settings that hold for them. A field is `None` while no such call runs.
    """

    model: Any = None  # call of a model that padding is removed from
    packed: Any = None  # packed forward of its decoder
    rows: Any = None  # forward of a decoder over padded rows, for a dry run
    layer: Any = None  # call of a layer within a packed forward
    checkpoint: object = None  # state of checkpoints where the packed forward began, or was restored
    batch_cache: Any = None  # what the forwards of a loss have read from their tensors
    planned: Any = None  # [`PlannedLayout`], which the running step has planned for its next forward
    runner: Any = None  # [`PartRunner`], which computes forwards of models in parts
    left_out: int = 0  # columns of the padded batch that its running part does not have
    own_checkpoint: bool = False  # whether the checkpoint around a forward is one of this package
    disabled: frozenset[object] = frozenset()  # attachments that are switched off
    unchecked: Any = None  # handles whose calls run padded, as part of a loss that nothing compares, with the reason
    stats: Any = None  # token counts of forwards that are not the user's, in place of a handle's
    strict: bool = False  # whether a call that cannot be packed raises an error, as with a handle's `strict`
    attention: str | None = None  # attention of padded forwards, in place of the one in the config


_NO_CALLS = Context()
_context: ContextVar[Context] = ContextVar("trl_padfix", default=_NO_CALLS)


def context() -> Context:
    """The context of this thread."""
    return _context.get()


@contextmanager
def within(**fields: Any) -> Iterator[None]:
    """Set fields of the [`Context`] until the block ends."""
    token = _context.set(replace(_context.get(), **fields))
    try:
        yield
    finally:
        _context.reset(token)


def outside_calls() -> AbstractContextManager[None]:
    """A block without a running model, decoder or rows call: forwards in it are calls of their own."""
    return within(model=None, packed=None, rows=None)


@contextmanager
def temporarily_set(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` until the block ends, except those that it does not have; `None` has none."""
    with ExitStack() as stack:
        for name, value in values.items():
            if hasattr(owner, name):
                if name in vars(owner):
                    stack.callback(setattr, owner, name, vars(owner)[name])
                else:
                    stack.callback(delattr, owner, name)
                setattr(owner, name, value)
        yield


def set_until_closed(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of `owner` until `stack` closes. A value that other code has set since then stays."""
    saved = {name: vars(owner)[name]} if name in vars(owner) else {}

    def undo() -> None:
        if vars(owner).get(name) is value:
            delattr(owner, name)
            vars(owner).update(saved)

    stack.callback(undo)
    setattr(owner, name, value)


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that does nothing in the calls of other threads, except in a backward."""
    thread = threading.get_ident()  # autograd recomputes forwards in threads of its own
    return lambda *args: hook(*args) if in_backward() or threading.get_ident() == thread else None


def in_backward() -> bool:
    """Whether a backward runs in this thread, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether this thread is within a checkpoint of torch around a model, or its recomputation; not one of ours."""
    # In torch 2.6 such calls are packed, and an error of torch says so if their backward differs.
    return bool(checkpoint_state()[1]) and not context().own_checkpoint


def checkpoint_state() -> tuple[bool, tuple[Any, ...]]:
    """What a checkpoint of torch changes: whether gradients are enabled (a reentrant one), or its hooks."""
    top_hooks = vars(vars(torch._C)["_autograd"]).get("_top_saved_tensors_default_hooks")  # torch 2.6 has none
    hooks = (top_hooks and top_hooks(True)) or ()
    is_checkpoint = any(hook.__module__ == checkpoint.__module__ for hook in hooks)
    return torch.is_grad_enabled(), hooks if is_checkpoint else ()
