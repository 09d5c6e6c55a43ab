"""The state of a trainer and its modules, put back after steps that only compare."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...core.context import temporarily_set
from ...core.probes import saved_modules
from .part import PaddingFreeTrainer


__all__ = ["kept_trainable", "saved_state"]

_RANDOM = ("drop", "noise", "jitter")
"""In names of the float attributes of modules that set how much noise a forward in training mode adds."""


@contextlib.contextmanager
def saved_state(trainer: PaddingFreeTrainer) -> Iterator[None]:
    """
    A block after which a trainer and its modules are as before: metrics, counters, buffers, gradients, random states.

    Plain values, tensors, random generators, and containers of them are put back, except datasets. Other objects that
    a user's loss writes to are not put back. Within the block `trainer.log` does nothing, and modules drop nothing and
    add no noise.
    """
    for unit in (module for module in trainer.model.modules() if isinstance(module, FSDPModule)):
        unit.reshard()  # a forward without backward leaves gathered parameters, which get no gradients
    modules = [m for value in vars(trainer).values() if isinstance(value, nn.Module) for m in value.modules()]
    values = {k: v for k, v in vars(trainer).items() if not (isinstance(v, nn.Module) or "dataset" in k)}
    device = trainer.args.device
    with contextlib.ExitStack() as stack:
        stack.enter_context(saved_modules(dict.fromkeys(modules)))
        _switch_off_noise(modules)
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.callback(vars(trainer).update, values)
        # A loss may add attributes.
        stack.callback(lambda old: [vars(trainer).pop(new) for new in vars(trainer).keys() - old], {*vars(trainer)})
        _put_back_contents(list(values.values()), stack, set())
        for parameter in trainer.model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        stack.enter_context(kept_trainable(trainer.model))
        stack.enter_context(temporarily_set(trainer, log=lambda *args, **kwargs: None))
        yield


@contextlib.contextmanager
def kept_trainable(model: nn.Module) -> Iterator[None]:
    """
    A block after which a model has the same trainable parameters, also if it raises.

    TRL computes the reference with the adapter switched off. When PEFT switches it on again, all of it is trainable.
    """
    with contextlib.ExitStack() as stack:
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
        yield


def _put_back_contents(value: Any, stack: contextlib.ExitStack, seen: set[int]) -> None:
    """Put the contents of a container or a tensor back into it when `stack` is closed, once for each id in `seen`."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        stack.callback(value.detach().copy_, value.detach().clone())
    elif isinstance(value, torch.Generator):
        stack.callback(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        stack.callback(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        stack.callback(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, dict | list | deque | set):
        contents = dict(value) if isinstance(value, dict) else list(value)  # `copy` would call a user's `__init__`
        stack.callback(value.extend if isinstance(value, list | deque) else value.update, contents)
        stack.callback(value.clear)  # runs first: a stack is closed from its end
        for x in value.values() if isinstance(value, dict) else value:
            _put_back_contents(x, stack, seen)


def _switch_off_noise(modules: list[nn.Module]) -> None:
    """Let modules in training mode drop nothing and add no noise; [`saved_modules`] puts their rates back."""
    for module in modules:
        # PEFT's own (BOFT) is no subclass of torch's.
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) or "Dropout" in type(module).__name__
        for name, value in vars(module).items():
            is_rate = isinstance(value, float) or name == "neftune_noise_alpha"  # which may be an integer
            if is_rate and (any(word in name for word in _RANDOM) or (is_dropout and name == "p")):
                vars(module)[name] = 0.0
