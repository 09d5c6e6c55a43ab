"""Detects custom losses (subclass, patch, `compute_loss_func`), whose reduction over rows is unknown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


__all__ = ["has_custom_loss", "loss_is_patched", "observe_loss"]

TRUSTED = (f"{__name__.partition('.')[0]}.", "trl.trainer.", "transformers.")
"""Modules with losses of known reduction. Losses of TRL's experiments or of a user may compare rows."""


def has_custom_loss(trainer: Any) -> bool:
    """Whether a user's subclass, or the trainer's `compute_loss_func`, computes the loss."""
    methods, loss_function = _methods_of_loss(type(trainer)), getattr(trainer, "compute_loss_func", None)
    owners = [owner for owner in type(trainer).__mro__ if methods & vars(owner).keys()]
    return (callable(loss_function) and not _is_trusted(loss_function)) or not all(map(_is_trusted, owners))


def loss_is_patched(trainer: Any) -> bool:
    """Whether a method of the loss was replaced on the trainer itself (and not in its class)."""
    replaced = _methods_of_loss(type(trainer)) & vars(trainer).keys()
    return not all(_is_trusted(vars(trainer)[name]) for name in replaced)


def _is_trusted(owner: Any) -> bool:
    return (getattr(owner, "__module__", None) or "").startswith(TRUSTED)


@cache
def _methods_of_loss(trainer_class: type) -> frozenset[str]:
    """Names of the methods that compute the loss: `compute_loss`, and those that these mention in their source."""
    methods, unread = set(), {"compute_loss"}
    while unread:
        methods.add(name := unread.pop())
        for owner in trainer_class.__mro__:
            method = inspect.unwrap(vars(owner).get(name))
            # Only TRL's and transformers' code is read: a user's method counts as custom whatever it calls.
            if owner.__module__.startswith(TRUSTED) and inspect.isfunction(method):
                mentioned = set(re.findall(r"self\.(\w+)", inspect.getsource(method)))
                unread |= {other for other in mentioned - methods if callable(getattr(trainer_class, other, None))}
    return frozenset(methods)


def observe_loss(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compute_loss`: its forwards run within `observe_step`, and it gets the batch without its metadata."""
    if getattr(compute_loss, "is_observed", False):  # inherited from a class that was wrapped already
        return compute_loss

    @wraps(compute_loss)
    def in_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        returns_outputs = bool(args[0] if args else kwargs.get("return_outputs"))
        with self.observe_step(model, inputs, returns_outputs) as step:
            step.result = compute_loss(self, model, step.inputs, *args, **kwargs)
        return step.result

    vars(in_step)["is_observed"] = True
    return in_step
