"""Losses that are not TRL's: what they make of the rows of a batch, and whether they call TRL's, is not known."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import cache, wraps
from typing import Any


__all__ = ["has_own_loss", "has_replaced_loss", "observed"]

KNOWN = (f"{__name__.partition('.')[0]}.", "trl.trainer.", "transformers.")
"""Modules whose losses are known; what TRL's experiments or a user make of a loss may compare rows."""


def has_own_loss(trainer: Any) -> bool:
    """Whether a subclass of a user, or the `compute_loss_func` of a trainer, computes the loss."""
    methods, given = _methods_of_loss(type(trainer)), getattr(trainer, "compute_loss_func", None)
    owners = [owner for owner in type(trainer).__mro__ if methods & vars(owner).keys()]
    return (callable(given) and not _is_known(given)) or not all(map(_is_known, owners))


def has_replaced_loss(trainer: Any) -> bool:
    """Whether a method of the loss was replaced on the trainer itself."""
    return not all(_is_known(vars(trainer)[name]) for name in _methods_of_loss(type(trainer)) & vars(trainer).keys())


def _is_known(owner: Any) -> bool:
    return (getattr(owner, "__module__", None) or "").startswith(KNOWN)


@cache
def _methods_of_loss(trainer_class: type) -> frozenset[str]:
    """The methods by which the loss of a trainer is computed: `compute_loss`, and those that these mention."""
    found, left = set(), {"compute_loss"}
    while left:
        found.add(name := left.pop())
        for owner in trainer_class.__mro__:
            method = inspect.unwrap(vars(owner).get(name))
            if owner.__module__.startswith(KNOWN) and inspect.isfunction(method):
                mentioned = set(re.findall(r"self\.(\w+)", inspect.getsource(method)))
                left |= {other for other in mentioned - found if callable(getattr(trainer_class, other, None))}
    return frozenset(found)


def observed(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """A `compute_loss` whose forwards are those of a step, on a batch without layouts."""
    if getattr(compute_loss, "is_observed", False):
        return compute_loss

    @wraps(compute_loss)
    def in_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        returns_outputs = bool(args[0] if args else kwargs.get("return_outputs"))
        with self.observe_step(model, inputs, returns_outputs) as step:
            step.result = compute_loss(self, model, step.inputs, *args, **kwargs)
        return step.result

    vars(in_step)["is_observed"] = True
    return in_step
