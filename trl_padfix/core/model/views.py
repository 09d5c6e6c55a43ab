"""
Views of modules: the same state, and another config.

Modules of transformers choose their attention by a name in their config. Many models and many threads may share one
config, so packed attention is never written there. A packed forward runs `forward` on a view instead: an object of a
subclass of the module's class, with the same `__dict__` (parameters, buffers, training flag) and another `config`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..context import context


__all__ = ["PACKED_ATTENTION", "ConfigView", "bound_to_view", "config_of", "view_of", "viewed_module"]


PACKED_ATTENTION = "trl_padfix"
"""Name of packed attention among transformers' attention and mask functions."""


class ConfigView:
    """A config with another name of its attention; all other attributes are read from and written to `config`."""

    __slots__ = ("_attn_implementation", "_attn_implementation_internal", "padfix_config")

    def __init__(self, config: PretrainedConfig, attention: str = PACKED_ATTENTION):
        # `object.__setattr__`, because `__setattr__` below writes to the config.
        object.__setattr__(self, "padfix_config", config)
        object.__setattr__(self, "_attn_implementation", attention)
        object.__setattr__(self, "_attn_implementation_internal", attention)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.padfix_config, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.padfix_config, name, value)

    def __copy__(self) -> ConfigView:
        return ConfigView(copy.copy(self.padfix_config), self._attn_implementation)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigView:
        return ConfigView(copy.deepcopy(self.padfix_config, memo), self._attn_implementation)

    def get_text_config(self, *args: Any, **kwargs: Any) -> ConfigView:
        text_config = self.padfix_config.get_text_config(*args, **kwargs)
        return self if text_config is self.padfix_config else ConfigView(text_config, self._attn_implementation)


@functools.cache
def _view_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `cls` whose instances have the attributes `names` in addition to their `__dict__`."""
    # Properties of a class win over the `__dict__` of an instance, and slots are stored outside of it.
    body: dict[str, Any] = {name: property(lambda view, name=name: view.padfix_overrides[name]) for name in names}
    body |= {"__slots__": ("padfix_overrides", "padfix_module"), "__module__": cls.__module__}
    view_class: Any = type(cls)(cls.__name__, (cls,), body)  # type: ignore[call-arg]
    if "forward" in vars(view_class) and "forward" not in names:
        # `GradientCheckpointingLayer` wraps the forward of each subclass when it is created, and only the outermost
        # wrapper checkpoints. That must be the one of `cls`, which the view inherits.
        del view_class.forward
    return view_class


def config_of(module: Any) -> Any:
    """The config of a module, which layers and some attention modules do not have; `None` without one."""
    return getattr(module, "config", None)


def view_of(module: Any, overrides: dict[str, Any]) -> Any:
    """`module` with other values for the attributes in `overrides`; it shares its state with the module."""
    if (config := config_of(module)) is not None:
        overrides = {"config": ConfigView(config, context().attention or PACKED_ATTENTION), **overrides}
    view = object.__new__(_view_class(type(module), tuple(overrides)))
    # The view has the module's own `__dict__`, not a copy: parameters, buffers and flags are the same objects. This
    # bypasses `nn.Module.__setattr__`, which would register `padfix_module` as a child.
    for name, value in (("__dict__", module.__dict__), ("padfix_overrides", overrides), ("padfix_module", module)):
        object.__setattr__(view, name, value)
    return view


def viewed_module(module: Any) -> Any:
    """The module of a view; the module itself if it is not a view."""
    return module.padfix_module if hasattr(type(module), "padfix_module") else module


def bound_to_view(module: Any, forward: Callable | None, **overrides: Any) -> Callable | None:
    """
    The forward of a module, bound to a view of the module with other values for the attributes in `overrides`.

    `forward` is `module.__dict__["forward"]`, if there is one: another library replaced the forward. Returns `None` if
    this replacement hides the module that it calls.
    """
    if isinstance(forward, functools.partial):
        # accelerate's hooks: a partial with the module as argument. It calls the original methods, which accelerate
        # keeps in attributes of the module (`_old_forward`): they must be bound to the view, too.
        replaced = {k: m for k, m in vars(module).items() if isinstance(m, MethodType) and m.__self__ is module}
        overrides |= dict.fromkeys(replaced)  # placeholders: the methods must be bound to the view, which comes first
        view = view_of(module, overrides)
        view.padfix_overrides.update({name: method.__func__.__get__(view) for name, method in replaced.items()})
        if not any(a is module for a in forward.args):
            return None
        return functools.partial(forward.func, *(view if a is module else a for a in forward.args), **forward.keywords)
    view = view_of(module, overrides)
    if forward is None:
        return type(module).forward.__get__(view)
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__.__get__(view)
    return None
