"""The state of modules during forwards that only compare: buffers and counters, hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


__all__ = ["saved_modules", "without_hooks"]

_PLAIN = (bool, int, float, str, type(None))


@contextlib.contextmanager
def saved_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A block after which buffers and plain attributes of modules are as before: running means, ranges, counts."""
    modules = list(modules)
    plain = [(vars(m), {name: x for name, x in vars(m).items() if isinstance(x, _PLAIN)}) for m in modules]
    buffers = [(m._buffers, name, x, x.clone()) for m in modules for name, x in m._buffers.items() if x is not None]
    try:
        yield
    finally:
        for members, values in plain:
            members.update(values)
        with torch.no_grad():
            for owner, name, buffer, copy in buffers:
                if buffer.shape != copy.shape:
                    buffer.resize_(copy.shape)
                owner[name] = buffer.copy_(copy)


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """A block in which no forward hook of a module runs: a user's hook may count its calls."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for table in (module._forward_hooks, module._forward_pre_hooks):
                stack.callback(table.update, dict(table))
                table.clear()
        yield
