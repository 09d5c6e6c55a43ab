"""The state of a trainer and its modules, put back after steps that only compare."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...core.model.saved_state import saved_modules


if TYPE_CHECKING:
    from .part import PaddingFreeTrainer


__all__ = ["saved_state", "without_noise"]

_RANDOM = ("drop", "noise", "jitter")
"""In names of the float attributes of modules that set how much noise a forward in training mode adds."""


@contextlib.contextmanager
def saved_state(trainer: PaddingFreeTrainer) -> Iterator[None]:
    """
    A block after which a trainer and its modules are as before: metrics, counters, buffers, gradients, random states.

    Plain values, tensors, and containers of them are put back. Other objects that a user's loss writes to are not.
    """
    modules = [m for value in vars(trainer).values() if isinstance(value, nn.Module) for m in value.modules()]
    values = {name: _copied(value) for name, value in vars(trainer).items() if not isinstance(value, nn.Module)}
    gradients = [(p, p.grad) for p in trainer.model.parameters()]
    device = trainer.args.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(saved_modules(dict.fromkeys(modules)))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for name, (value, copy) in values.items():
                vars(trainer)[name] = _restored(value, copy)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _copied(value: Any) -> tuple[Any, Any]:
    """A value, and a copy of what may be written into it: the contents of a container or a tensor."""
    if isinstance(value, torch.Tensor):
        return value, value.detach().clone()
    if isinstance(value, dict):
        return value, {key: _copied(x) for key, x in value.items()}
    if isinstance(value, list | deque | set):
        return value, [_copied(x) for x in value]
    return value, None


def _restored(value: Any, copy: Any) -> Any:
    """The value itself, with the contents of its copy."""
    if isinstance(value, torch.Tensor):
        value.detach().copy_(copy)
    elif isinstance(value, dict):
        contents = {key: _restored(*item) for key, item in copy.items()}
        value.clear()
        value.update(contents)
    elif isinstance(value, list | deque | set):
        contents = [_restored(*item) for item in copy]
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(contents)
    return value


@contextlib.contextmanager
def without_noise(modules: list[nn.Module]) -> Iterator[None]:
    """A block in which modules in training mode drop nothing and add no noise."""
    saved = []
    for module in modules:
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        for name, value in vars(module).items():
            is_rate = isinstance(value, float) or name == "neftune_noise_alpha"  # which may be an integer
            if is_rate and (any(word in name for word in _RANDOM) or (is_dropout and name == "p")):
                saved.append((vars(module), name, value))
    for members, name, _ in saved:
        members[name] = 0.0
    try:
        yield
    finally:
        for members, name, value in saved:
            members[name] = value
