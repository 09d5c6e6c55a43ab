"""
User code in the forward or backward of a step.

A custom loss (subclass, patch, `compute_loss_func`) reduces rows in an unknown way. In a split batch a hook runs once
for each part.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.training_args import OptimizerNames

from ...core.anatomy import find_pretrained
from ...core.context import set_until_closed, temporarily_set
from ...core.handle import PaddingRemoval
from ...core.model.changes import is_harmless
from ...core.model.inspection import TRUSTED_GRADIENT_HOOKS, is_of, module_of, name_of
from ...core.patches.heads import SCORED_FROM_PADDING
from ..data.batch_rows import scores_padding
from ..distributed import PaddingFreeTrainer


__all__ = [
    "INPUT_METHODS",
    "custom_batch_name", "custom_loss_name", "custom_method", "gradient_hook_name", "hook_beside_loss",
    "is_custom_collator", "module_hook_names", "observe_loss", "observe_user_loss",
    "observe_user_step", "why_padded",
]  # fmt: skip

TRUSTED = (f"{__name__.partition('.')[0]}.", "trl.", "transformers.")
"""Modules whose losses are not user code; a task says whether their reduction is known."""

INPUT_METHODS = {"_prepare_inputs", "_generate_and_score_completions", "_generate", "_calculate_rewards"}
"""Methods that a trainer calls before its `compute_loss`."""

LOSS_METHODS = {
    "compute_loss", "_compute_loss", "_compute_kl_logps", "_get_last_hidden_state",
    "_get_per_token_logps_and_entropies", "get_gamma_weights", "get_high_entropy_mask", "get_off_policy_mask",
}  # fmt: skip
"""TRL's methods that compute a loss, or a part of one: a user may override them."""

DECORATORS = ("torch.utils._contextlib", "contextlib")
"""Modules with decorators of TRL's methods, which do not change the value of a loss."""


def custom_loss_name(trainer: PaddingFreeTrainer) -> str | None:
    """
    Name of the user's code that computes the loss of a trainer, or a part of it; `None` if TRL computes all of it.

    It is a method of a subclass or a mixin, a function that was set on a class or on the
    trainer itself, or `compute_loss_func`. Looking at the class is not enough, because methods may be patched onto it.
    """
    if name := custom_method(trainer, LOSS_METHODS):
        return name
    loss_function = vars(trainer).get("compute_loss_func")
    # GRPO in TRL 1.10 sets a string, which only turns a scaling off.
    return "compute_loss_func" if callable(loss_function) and not _is_trusted(loss_function) else None


def custom_batch_name(trainer: PaddingFreeTrainer) -> str | None:
    """Name of the user's code in a step that may depend on which rows share a batch; `None` if there is none."""
    methods = {"training_step", "_prepare_inputs", "get_batch_samples"}
    return custom_loss_name(trainer) or custom_method(trainer, methods) or gradient_hook_name(trainer)


def hook_beside_loss(trainer: PaddingFreeTrainer, inner: bool = False) -> str | None:
    """
    Name of a user's hook on the base model or within it (with `inner`: only within it), if a user's loss or step may
    read what the hook keeps; else `None`.
    """
    if custom_loss_name(trainer) is None and custom_method(trainer, {"training_step"}) is None:
        return None
    modules = [*find_pretrained(trainer.model).base_model.modules()][inner:]  # the first is the base model
    hooks = (hook for m in modules for hook in m._forward_hooks.values() if not is_harmless(hook))
    return next(map(name_of, hooks), None)


def why_padded(trainer: Any, handle: PaddingRemoval, inputs: Any, in_parts: bool = False) -> str | None:
    """Why the forwards of a step run padded ("The forward has ..."); `None` if they may be packed, or `in_parts`."""
    # Hooks of the whole decoder get unpacked states; under a budget these are the rows of one part.
    if name := hook_beside_loss(trainer, inner=not in_parts):
        return f"`{name}`, a hook within the model, whose padded states your loss may read. Remove it to run packed"
    # A model without a head for tokens predicts no label from the token before it.
    return SCORED_FROM_PADDING if handle.anatomy.head is not None and scores_padding(inputs) else None


def custom_method(trainer: PaddingFreeTrainer, methods: set[str], below: bool = False) -> str | None:
    """
    Name of the first of `methods` that is a user's, on the trainer or one of its classes; `None` if there is none.

    With `below`, only methods of classes behind ours count: a `training_step` there runs within ours, and may compute
    the loss and its backward itself.
    """
    # All owners, also those with overridden methods: `super()` may call them.
    owners = [("trainer", vars(trainer)), *((c.__name__, vars(c)) for c in type(trainer).__mro__[:-1])]
    if below:
        ours = max(i for i, c in enumerate(type(trainer).__mro__) if c.__module__.startswith(TRUSTED[0]))
        owners = owners[ours + 2 :]
    found = ((owner, name, members[name]) for owner, members in owners for name in sorted(methods & members.keys()))
    return next((f"{owner}.{name}" for owner, name, method in found if not _is_trusted(method)), None)


def is_custom_collator(collator: object) -> bool:
    """Whether a collator is a user's: its result for a row may depend on the other rows of the batch."""
    owners = [] if inspect.isroutine(collator) else [vars(collator), *map(vars, type(collator).__mro__)]
    calls = [owner[name] for owner in owners for name in ("__call__", "torch_call") if name in owner] or [collator]
    return not all(map(_is_trusted, calls))


def _functions(value: Any) -> Iterator[Any]:
    """A function and the functions that it decorates, the innermost last."""
    while value is not None:
        value = value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_trusted(value: object) -> bool:
    """Whether a function, and all that decorate it, are TRL's, transformers' or ours. A `partial` is a user's."""
    *decorators, innermost = map(module_of, _functions(value))
    return innermost.startswith(TRUSTED) and all(name.startswith((*TRUSTED, *DECORATORS)) for name in decorators)


def observe_loss(compute_loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compute_loss`: its forwards run within `observe_step`, on the batch of that step."""
    if getattr(compute_loss, "is_observed", False):  # inherited from a class that was wrapped already
        return compute_loss

    @wraps(compute_loss)
    def in_step(
        self: PaddingFreeTrainer, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        compute_loss = vars(in_step)["__wrapped__"]  # `%autoreload` replaces it
        if not (vars(self).get("padding") and self.padding.parts):  # another trainer's, or none of our fields is set
            return compute_loss(self, model, inputs, *args, **kwargs)
        arguments = dict(zip(("return_outputs", "num_items_in_batch"), args, strict=False)) | kwargs
        with self.observe_step(model, inputs, arguments) as step:
            step.result = compute_loss(self, model, step.inputs, *args, **kwargs)
        return step.result

    vars(in_step)["is_observed"] = True
    return in_step


def observe_user_loss(trainer: PaddingFreeTrainer) -> contextlib.AbstractContextManager[None]:
    """A block in which a `compute_loss` that was set on the trainer, or on its class, runs within `observe_step`."""
    of_user = trainer.compute_loss
    if getattr(of_user, "is_observed", False):
        return contextlib.nullcontext()

    @wraps(of_user)  # also for `custom_loss_name`, which still finds the user's function
    def compute_loss(self: PaddingFreeTrainer, *args: Any, **kwargs: Any) -> Any:
        return of_user(*args, **kwargs)

    return temporarily_set(trainer, compute_loss=MethodType(observe_loss(compute_loss), trainer))


def observe_user_step(trainer: PaddingFreeTrainer) -> None:
    """Run a step within `around_user_step`, if it is a user's, which may call the model outside of `compute_loss`."""
    of_user, name = trainer.training_step, custom_method(trainer, {"training_step"})
    if getattr(of_user, "is_observed", False) or name is None:
        return

    observed = trainer.around_user_step(name)(of_user)
    vars(observed)["is_observed"] = True
    set_until_closed(trainer.padding.undo, trainer, "training_step", observed)


def gradient_hook_name(trainer: PaddingFreeTrainer) -> str | None:
    """
    Name of the code that changes gradients or weights of the policy within a backward; `None` if there is none.

    Such code is a hook of a parameter (`register_hook`, `register_post_accumulate_grad_hook`), or an optimizer that
    steps in such hooks. Whether a hook is linear in the gradient is unknown, and a step of an optimizer is not.
    """
    if "layerwise" in (optimizer := OptimizerNames(trainer.args.optim).value):
        return f"optim={optimizer!r}"
    for name, parameter in trainer.model.named_parameters():
        if "_in_backward_optimizers" in vars(parameter):
            return f"the optimizer that steps in the backward of {name}"
        if hook := next(_of_user([parameter._backward_hooks, parameter._post_accumulate_grad_hooks]), None):
            return f"{hook}, a gradient hook of {name}"
    return None


def module_hook_names(model: nn.Module) -> list[str]:
    """The hooks of modules that a user has registered, by name."""
    kinds = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")
    hooks = [(name, *(vars(m)[kind] for kind in kinds)) for name, m in model.named_modules()]
    return [f"{hook} of {name or type(model).__name__}" for name, *kinds in hooks for hook in _of_user(kinds)]


def _of_user(kinds: Iterable[Mapping[Any, Any] | None]) -> Iterable[str]:
    """Names of the hooks that no library has registered."""
    hooks = (hook for hooks in kinds for hook in (hooks or {}).values())
    return (name_of(hook) for hook in hooks if not is_of(hook, TRUSTED_GRADIENT_HOOKS))
