"""
Changes of a decoder's modules after padding removal was attached: hooks, and modules that were replaced.

A hook within the decoder gets the packed row `(1, T, ...)` instead of the padded batch. If the hook depends on the
place of a token, or on the row, its results would differ. A module that replaces another has none of its patches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from ..errors import UnpackableCallError


__all__ = ["ModuleChanges"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_HARMLESS = {"accelerate", "deepspeed", "torch", "transformers", "trl", "trl_padfix", "wandb"}
"""Packages whose hooks gather parameters, record outputs, or treat each token by itself."""

_READY_FOR_CHECKPOINTS = "make_inputs_require_grad"
"""In names of hooks on an embedding that let its output require a gradient: transformers', PEFT's, TRL's."""


class ModuleChanges:
    """
    Finds hooks and modules that were added to a decoder after attachment.

    Args:
        decoder (`torch.nn.Module`):
            The decoder. Its own hooks are not checked: they run outside of its patch, on the padded batch.
        patched (`list` of `torch.nn.Module`):
            Modules that have patches, those outside of the decoder among them.
    """

    def __init__(self, decoder: nn.Module, patched: list[nn.Module]):
        self.decoder = decoder
        self._read_modules()
        # Modules, not their ids: a deep copy of the model has other ids.
        self.patched = set(self.modules) & set(patched)
        self.types = frozenset(type(module) for module in self.patched)
        self.unpatched = {module for module in self.modules if type(module) in self.types} - self.patched
        self.accepted: set[Callable[..., Any]] = set()
        self.accept_hooks()

    def accept_hooks(self) -> None:
        """Take the hooks that are registered now as part of the model."""
        self._check_modules()
        self.accepted |= {hook for hooks in self.hooks for hook in hooks.values() if not _is_harmless(hook)}

    def check(self) -> None:
        """
        Compare the modules of the decoder with those at attachment; on the host, in a millisecond for 2,000 modules.

        Raises:
            UnpackableCallError: If a module was replaced, or has a new hook.
        """
        self._check_modules()
        if not any(self.hooks):  # as in nearly all models
            return
        for i, hooks in enumerate(self.hooks):
            for hook in hooks.values():
                if hook in self.accepted or _is_harmless(hook):
                    continue
                module = self.modules[i // len(_HOOKS)]
                raise UnpackableCallError(
                    "hook",
                    f"`{_name(hook)}` was registered as a hook of a {type(module).__name__} "
                    f"in {type(self.decoder).__name__} after padding removal was attached. A packed forward would "
                    "give it one row of all real tokens in place of the padded batch. Remove the hook after use; or "
                    "register it before padding removal is attached, if it treats every token by itself.",
                )

    @property
    def has_changed(self) -> bool:
        """Whether [`ModuleChanges.check`] raises an error."""
        try:
            self.check()
        except UnpackableCallError:
            return True
        return False

    def _read_modules(self) -> None:
        """Record the modules, and the dictionaries of their children and hooks."""
        self.modules, self.children = [], [self.decoder._modules]
        for children in self.children:  # the loop appends to its list: breadth first
            modules = [child for child in children.values() if child is not None]
            self.modules += modules
            self.children += [module._modules for module in modules]
        self.hooks = [vars(module)[name] for module in self.modules for name in _HOOKS]

    def _check_modules(self) -> None:
        """Read the modules again if any was added, removed or replaced; an error if patches are missing then."""
        current = chain.from_iterable(children.values() for children in self.children)
        # Without a loop in Python; lists compare their elements by identity first.
        if [child for child in current if child is not None] == self.modules:
            return
        self._read_modules()
        # Wrappers (LoRA's, FSDP's, those of checkpointing) keep the patched modules, and so do no harm.
        missing = self.patched.difference(self.modules)
        missing |= {m for m in self.modules if type(m) in self.types and m not in self.patched | self.unpatched}
        if missing:
            self.modules = []  # compare again in the next call
            raise UnpackableCallError(
                "replaced module",
                f"A {type(next(iter(missing))).__name__} of {type(self.decoder).__name__} was added, removed or "
                "replaced after padding removal was attached. Only modules that were there have patches. Call "
                "`handle.remove()` before such a change, and attach again after it.",
            )


def _is_harmless(hook: Callable[..., Any]) -> bool:
    function = _function(hook)
    package = (getattr(function, "__module__", None) or "").partition(".")[0]
    return package in _HARMLESS or _READY_FOR_CHECKPOINTS in _name(hook)


def _name(hook: Callable[..., Any]) -> str:
    function = _function(hook)
    return getattr(function, "__qualname__", type(function).__name__)


def _function(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a hook calls, without `functools.partial` around it, which PEFT registers."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook
