"""Detects user code in the forward or backward pass, which runs once for each part of a split batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.training_args import OptimizerNames

from ...core.model.inspection import is_of, name_of


if TYPE_CHECKING:
    from ..protocols import TaskTrainer


__all__ = ["gradient_hook_name", "module_hook_names"]

LIBRARIES = {"trl_padfix", "torch", "accelerate", "transformers", "trl", "peft", "deepspeed", "bitsandbytes"}
"""Modules whose hooks reduce, gather or unscale gradients, which is linear. `optim` names their optimizers."""


def gradient_hook_name(trainer: TaskTrainer) -> str | None:
    """
    Name of the code that changes gradients or weights of the policy within a backward; `None` if there is none.

    Such code is a hook of a parameter (`register_hook`, `register_post_accumulate_grad_hook`), or an optimizer that
    steps in such hooks. Whether a hook is linear in the gradient is unknown, and a step of an optimizer is not.
    """
    optimizer = OptimizerNames(trainer.args.optim).value
    if "layerwise" in optimizer:
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
    return (name_of(hook) for hook in hooks if not is_of(hook, LIBRARIES))
