"""
A module as a packed forward sees it: its own state, and a config that names packed attention.

Modules of transformers look their attention up by a name in their config. Many models, and many threads, may share one
config, so the name is never written there. A packed forward runs `forward` on a view instead: an object of a subclass
of the module's class with the very same `__dict__`, whose `config` answers with our name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..context import context


__all__ = ["PACKED_ATTENTION", "bound_to_view", "view_of", "viewed_module"]

PACKED_ATTENTION = "trl_padfix"
"""Name of packed attention among transformers' attention and mask functions."""


class ConfigView:
    """A config of which everything is the given one's, but the name of its attention."""

    __slots__ = ("_attn_implementation", "_attn_implementation_internal", "padfix_config")

    def __init__(self, own: PretrainedConfig, attention: str = PACKED_ATTENTION):
        object.__setattr__(self, "padfix_config", own)
        object.__setattr__(self, "_attn_implementation", attention)
        object.__setattr__(self, "_attn_implementation_internal", attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.padfix_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.padfix_config, name, value)

    def get_text_config(self, *args: Any, **kwargs: Any) -> ConfigView:
        found = self.padfix_config.get_text_config(*args, **kwargs)
        return self if found is self.padfix_config else ConfigView(found, self._attn_implementation)


@functools.cache
def _view_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `cls` whose instances hold `names` apart from their `__dict__`."""

    def held(name: str) -> property:
        return property(lambda view: view.padfix_held[name])

    body = {name: held(name) for name in names}
    body |= {"__slots__": ("padfix_held", "padfix_module"), "__module__": cls.__module__}
    made: Any = type(cls)(cls.__name__, (cls,), body)  # type: ignore[call-arg]
    if "forward" in vars(made) and "forward" not in names:
        # A layer that can be checkpointed wraps the forward of every subclass, and only the outermost checkpoints.
        del made.forward
    return made


def view_of(module: Any, held: dict[str, Any]) -> Any:
    """`module` with the attributes in `held` of another value; its state is the very same."""
    if hasattr(module, "config"):
        held = {"config": ConfigView(module.config, context().attention or PACKED_ATTENTION), **held}
    cls = _view_class(type(module), tuple(held))
    view = object.__new__(cls)
    for name, value in (("__dict__", module.__dict__), ("padfix_held", held), ("padfix_module", module)):
        object.__setattr__(view, name, value)
    return view


def viewed_module(module: Any) -> Any:
    """The module that a view stands for, or the module itself."""
    return module.padfix_module if hasattr(type(module), "padfix_module") else module


def bound_to_view(module: Any, forward: Callable | None, **held: Any) -> Callable | None:
    """
    The forward of a module as a packed forward calls it: on a view of it, on which also what is `held` differs.

    `forward` is what stands in `module.__dict__["forward"]`, if anything does. `None` if it is a wrapper that does not
    show which module it calls.
    """
    if isinstance(forward, functools.partial):  # accelerate's hooks: they call what they replaced, kept beside it
        replaced = {k: m for k, m in vars(module).items() if isinstance(m, MethodType) and m.__self__ is module}
        held |= dict.fromkeys(replaced)
        view = view_of(module, held)
        view.padfix_held.update({name: method.__func__.__get__(view) for name, method in replaced.items()})
        if not any(a is module for a in forward.args):
            return None
        return functools.partial(forward.func, *(view if a is module else a for a in forward.args), **forward.keywords)
    view = view_of(module, held)
    if forward is None:
        return type(module).forward.__get__(view)
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__.__get__(view)
    return None
