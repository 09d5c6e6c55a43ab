"""
Changes of a decoder's modules after padding removal was attached: hooks, forwards, and modules that were replaced.

A hook within the decoder gets the packed row `(1, T, ...)` instead of the padded batch. If the hook depends on the
place of a token, or on the row, its results would differ. The results of a new module or of another `forward` would
differ, too. A module that replaces another one has no patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import methodcaller
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules import module as torch_module

from ..errors import UnpackableCallError
from .inspection import TRUSTED_HOOKS, TRUSTED_MODULES, is_of, name_of, package_of


__all__ = ["ModuleChanges", "has_reader", "is_harmless"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
"""Hooks of all modules of the process."""

_BY_TOKEN = {c.__module__ for c in (nn.ReLU, nn.Sequential, nn.Dropout, nn.Linear, nn.LayerNorm, nn.Embedding)}
"""Modules of `torch.nn.modules` whose classes treat each token by itself; classes of other modules mix tokens."""

_READY_FOR_CHECKPOINTS = "make_inputs_require_grad"
"""Parts of the names of hooks that make an embedding's output require a gradient: transformers', PEFT's, TRL's."""

_own_forward = methodcaller("get", "forward")

_ONE_ROW = "A packed forward would give it one row of all real tokens in place of the padded batch."


class ModuleChanges:
    """
    Finds hooks, forwards and modules that were added to a decoder after attachment.

    Args:
        decoder (`torch.nn.Module`):
            The decoder. Its own hooks are not checked: they run outside of its patch, on the padded batch.
        patched (`list` of `torch.nn.Module`):
            Modules that have patches, including modules outside of the decoder.
    """

    def __init__(self, decoder: nn.Module, patched: list[nn.Module]):
        self.decoder = decoder
        self._read_modules()
        # Modules, not their ids: a deep copy of the model has other ids.
        self.patched = set(self.modules) & set(patched)
        self.types = frozenset(type(module) for module in self.patched)
        self.known = set(self.modules)
        self.accepted: set[Callable[..., Any]] = set()
        self.accept_hooks()

    def accept_hooks(self) -> None:
        """Accept the current hooks, forwards and modules as part of the model."""
        self.known |= {module for module in self.decoder.modules() if type(module) not in self.types}
        self._check_modules()
        self.accepted |= {hook for _, hook in self._hooks() if not is_harmless(hook)}
        self.accepted |= {forward for forward in self._forwards() if forward is not None}

    def check(self) -> str | None:
        """
        Compare the modules of the decoder with those at attachment; on the host, in a millisecond for 2,000 modules.

        Returns:
            `str`, *optional*: A user's hook that was accepted, with the modules that it is registered for.

        Raises:
            UnpackableCallError: If a module was replaced, or has a new hook or forward.
        """
        self._check_modules()
        for forward in self._forwards():
            if forward is not None and forward not in self.accepted and not is_of(forward, TRUSTED_MODULES):
                self._refuse("forward", f"`{name_of(forward)}` was set as the forward of a module in", "Set it")
        if not any(self.hooks) and not any(_GLOBAL_HOOKS):  # nearly all models have no hooks
            return None
        of_user = [(place, hook) for place, hook in self._hooks() if not is_harmless(hook)]
        for place, hook in of_user:
            if hook not in self.accepted:
                what = f"`{name_of(hook)}` was registered as a hook of {place} in"
                self._refuse("hook", what, "Remove the hook after use; or register it")
        return next((f"`{name_of(hook)}`, a hook of {place}," for place, hook in of_user), None)

    def _refuse(self, kind: str, what: str, remedy: str) -> NoReturn:
        raise UnpackableCallError(
            kind,
            f"{what} {type(self.decoder).__name__} after padding removal was attached. {_ONE_ROW} {remedy} before "
            "padding removal is attached, if it treats every token by itself.",
        )

    def _hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """All hooks, each with the modules that it is registered for."""
        for i, hooks in enumerate(self.hooks):
            yield from ((f"a {type(self.modules[i // len(_HOOKS)]).__name__}", hook) for hook in hooks.values())
        yield from (("all modules", hook) for hooks in _GLOBAL_HOOKS for hook in hooks.values())

    def _forwards(self) -> set[Any]:
        """The forwards that were set on modules themselves, and the forwards of their classes."""
        # Types are read again, because code may set the class of a module.
        # And from the modules: a deep copy of this object has dictionaries that differ from the copied modules'
        # dictionaries.
        return {*map(_own_forward, map(vars, self.modules))} | {c.forward for c in set(map(type, self.modules))}

    def _read_modules(self) -> None:
        """Record the modules, and the dictionaries of their children, hooks and attributes."""
        self.modules, self.children = [], [self.decoder._modules]
        for children in self.children:  # the loop appends to its list: breadth first
            modules = [child for child in children.values() if child is not None]
            self.modules += modules
            self.children += [module._modules for module in modules]
        self.places = self._current_places()
        self.hooks = [vars(module)[name] for module in self.modules for name in _HOOKS]

    def _current_places(self) -> list[nn.Module | None]:
        """What stands now in each place of a child."""
        return [*chain.from_iterable(map(dict.values, self.children))]

    def _check_modules(self) -> None:
        """Read the modules again if any was added, removed or replaced; an error if patches are missing then."""
        if self._current_places() == self.places:  # lists compare their elements by identity first
            return
        self._read_modules()
        # Wrappers (of LoRA, FSDP, checkpointing) keep the patched modules, so they do no harm.
        changed = self.patched.difference(self.modules)
        added = set(self.modules) - self.known
        changed |= {module for module in added if type(module) in self.types or not _is_by_token(type(module))}
        if changed:
            module, self.places = next(iter(changed)), []  # compare again in the next call
            raise UnpackableCallError(
                "replaced module",
                f"A {type(module).__name__} of {type(self.decoder).__name__} was added, removed or replaced after "
                f"padding removal was attached. Only modules that were there have patches. {_ONE_ROW} Change the "
                "model, then make a new trainer (without a trainer: remove the handle and attach again).",
            )


def _is_by_token(module: type[nn.Module]) -> bool:
    """Whether modules of a class treat each token by itself, or wrap others."""
    if module.__module__.startswith("torch.nn.modules."):
        return module.__module__ in _BY_TOKEN and module is not nn.MultiheadAttention
    return package_of(module) in TRUSTED_MODULES


def has_reader(module: nn.Module) -> bool:
    """Whether a user's hook, or a user's forward on the module itself, gets the output of the module."""
    forward = vars(module).get("forward", nn.Module.forward)
    return not (is_of(forward, TRUSTED_MODULES) and all(map(is_harmless, module._forward_hooks.values())))


def is_harmless(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of a package whose hooks do not depend on the place of a token."""
    return is_of(hook, TRUSTED_HOOKS) or _READY_FOR_CHECKPOINTS in name_of(hook)
