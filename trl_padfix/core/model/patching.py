"""
Patches of the forwards of modules, the views on which they run, and the attachment that puts them on and takes them
off.

Modules of transformers choose their attention by a name in their config. Many models and many threads may share one
config, so packed attention is never written there. A packed forward runs `forward` on a view instead: an object of a
subclass of the module's class, with the same `__dict__` (parameters, buffers, training flag) and another `config`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from ..context import context, within
from ..errors import PaddingRemovalError
from .inspection import bind, is_of, name_of
from .older import has_cache


if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = [
    "PACKED_ATTENTION", "Attachment", "BatchPatch", "ForwardPatch", "RunnerPatch", "beneath_patches", "bound_to_view",
    "checkpoint_state", "config_of", "in_backward", "in_checkpoint", "patches_on", "view_of",
    "viewed_module",
]  # fmt: skip


class Attachment:
    """The patches of a model, put on and taken off together; a context manager that detaches at its end."""

    def __init__(self) -> None:
        self.owned_by_trainer = False  # the next trainer on the model removes it before it attaches its own
        self._patches: list[ForwardPatch] = []
        self._recomputable: set[int] = set()  # ids of packed forwards that gradient checkpointing may recompute
        self.is_removed = False  # by its owner, or by another trainer
        self.taken_over = False  # see `take_over`
        self.is_copy = False  # of a deep copy of the model: its patches work, and nobody holds it

    def attach(self, patches: Iterable[ForwardPatch]) -> Self:
        """Put `patches` on their modules: all of them, or none."""
        try:
            for patch in patches:
                patch.put_on()
                self._patches.append(patch)
        except BaseException:
            self.remove()
            raise
        return self

    def take_over(self) -> None:
        """Detach for another trainer of the same model; the first trainer attaches again when it computes again."""
        self.taken_over = True
        self.remove()

    def __enter__(self) -> Self:
        if self.is_removed:
            raise ValueError("This handle was removed: attach again with `remove_padding(model)`.")
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """
        Detach.

        Patches that gradient checkpointing still needs stay until the graph of the last packed forward is gone.
        """
        self.is_removed = True
        needed = [patch for patch in self._patches if self._recomputable and patch.serves_recomputation]
        for patch in reversed(self._patches):  # a module may have several: the outermost first
            if patch not in needed:
                patch.take_off()
        self._patches = needed

    @property
    def enabled(self) -> bool:
        """Whether calls of this thread are packed; see [`Attachment.disabled`]."""
        return not self.is_removed and self not in context().disabled

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute as before attachment until the block ends, in this thread."""
        with within(disabled=context().disabled | {self}):
            yield

    @contextmanager
    def reenabled(self) -> Iterator[None]:
        """Undo [`Attachment.disabled`] until the block ends."""
        with within(disabled=context().disabled - {self}):
            yield


class _Patches(dict[str, "ForwardPatch"]):
    """
    The patches of a module by their keys, in an attribute of the module: the last one put on is the outermost.

    A deep copy of the module has copies of them. A pickle of it has none, as its class has none.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Patches:
        memo[id(self)] = copied = _Patches()
        copied.update({key: copy.deepcopy(patch, memo) for key, patch in self.items()})
        return copied

    def __reduce__(self) -> tuple[type[dict], tuple]:
        return dict, ()


_ATTRIBUTE = "_trl_padfix_patches"

_keys = itertools.count()


def patches_on(module: nn.Module) -> list[ForwardPatch]:
    """The patches of this package on a module, the outermost first, also those beneath wrappers of other libraries."""
    return [patch for patch in reversed(vars(module).get(_ATTRIBUTE, _Patches()).values()) if patch.is_on]


class ForwardPatch:
    """
    `module.forward`, wrapped for as long as the patch is on.

    `module.forward` is then a bound method of the module, as it is without a patch. Its function looks up the patch of
    the module that it is called with. So a deep copy of the module runs a patch of its own, and another library may
    wrap the method, or its `__func__` as accelerate does under mixed precision. Such a wrapper stays when the patch is
    taken off: the function beneath it passes every call on.
    """

    serves_recomputation = False
    """Whether recomputed forwards need the patch, perhaps after the handle was removed."""

    runs_on_view = False
    """Whether packed forwards run the module on a view of it."""

    is_on = False

    def __init__(self, module: nn.Module, attachment: Attachment):
        self.module: Any = module
        self.attachment: Any = attachment  # `Any`, because most patches need the fields of a `PaddingRemoval`
        self.below: Any = None  # the forward that an instance attribute held before this patch
        self.method: MethodType | None = None  # what `module.forward` is while the patch is on
        self.key = ""

    def put_on(self) -> None:
        _drop_removed(self.module)
        above = _removed_beneath_accelerate(self.module)
        self.below = self.module.__dict__.get("forward") if above is None else above.below
        if self.runs_on_view:
            self.on_view()  # raises now, not in the first forward, if there can be no view
        self.key, self.is_on = f"{type(self).__name__}-{next(_keys)}", True
        self.module.__dict__.setdefault(_ATTRIBUTE, _Patches())[self.key] = self
        self.method = MethodType(_patched_forward(self.key, self.module, self.wrapped), self.module)
        if above is None:
            self.module.forward = self.method
        else:
            above.below = self.method

    @property
    def wrapped(self) -> Any:
        """The forward beneath this patch."""
        return self.below if self.below is not None else type(self.module).forward.__get__(self.module)

    def on_view(self, **overrides: Any) -> Callable:
        """
        The forward for packed calls: on a view of the module, without other patches of this package.

        Raises:
            PaddingRemovalError: If another library replaced the forward and hides the module that it calls.
        """
        below = beneath_patches(self.module, self.below)
        forward = bound_to_view(self.module, below, **overrides)
        if forward is None:
            raise PaddingRemovalError(
                f"The forward of {type(self.module).__name__} was replaced before padding removal was attached, by "
                f"`{name_of(below)}`, which hides the module that it calls. "
                "If a library wraps it, attach first (`remove_padding(model)`). If the function is your own, make it "
                f"the `forward` of a subclass of {type(self.module).__name__}."
            )
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on or torch.jit.is_tracing():  # a trace would keep the layout of its example
            return self.wrapped(*args, **kwargs)
        # `torch.compiler.disable` costs time on the host in every layer.
        return (self._untraced if torch.compiler.is_dynamo_compiling() else self.call)(*args, **kwargs)

    # Packing reads lengths from the device, and dynamo would recompile it for each of them.
    @torch.compiler.disable
    def _untraced(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The forward while the patch is on."""
        return self.packed(*args, **kwargs) if self.attachment.enabled else self.wrapped(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        """The forward while padding removal is on."""
        raise NotImplementedError

    def take_off(self) -> None:
        """Remove this patch from the chain of patches on its module."""
        self.is_on = False
        _drop_removed(self.module)


def _patched_forward(key: str, patched: nn.Module, wrapped: Any) -> Callable:
    """The function of the method that a patch puts on a module, with the signature of the forward beneath it."""
    is_own = isinstance(wrapped, MethodType) and wrapped.__self__ is patched
    beneath: Any = wrapped.__func__ if is_own else wrapped  # the function may run a copy of the module

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:
            _follow_unwrapping(module)
            args = args[1:]
        patch = vars(module).get(_ATTRIBUTE, _Patches()).get(key)
        if patch is None:  # code has kept the method, and the patch was taken off
            return beneath(module, *args, **kwargs) if is_own else beneath(*args, **kwargs)
        if viewed_module(module) is module:
            return patch(*args, **kwargs)
        # Beneath the wrapper of another library, which a later packed forward runs on a view.
        below = beneath_patches(patch.module, patch.below)
        of_class = type(patch.module).forward
        return (of_class if below is None else below.__func__)(module, *args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.signature(wrapped)
    vars(forward)["__signature__"] = signature.replace(parameters=[own, *signature.parameters.values()])
    return forward


def _removed_beneath_accelerate(module: nn.Module) -> ForwardPatch | None:
    """The removed patch beneath accelerate's mixed precision; a new one goes beneath it, as if it had been first."""
    removed = {p.method.__func__: p for p in vars(module).get(_ATTRIBUTE, {}).values() if p.method and not p.is_on}
    function: Any = vars(module).get("forward")
    while removed and function not in removed:
        if isinstance(function, MethodType):
            function = function.__func__
        elif is_of(function, {"accelerate", "torch", "trl_padfix"}):
            function = vars(function).get("__wrapped__")
        else:
            return None
    return removed.get(function)


def _follow_unwrapping(module: nn.Module) -> None:
    """Remove accelerate's mixed precision beneath the patches of a module that accelerate has unwrapped."""
    forward: Any = vars(module).get("forward")
    # `unwrap_model(keep_fp32_wrapper=False)` makes a method of the method of the outermost patch.
    if not (isinstance(forward, MethodType) and isinstance(forward.__func__, MethodType)):
        return
    patches = vars(module).get(_ATTRIBUTE, _Patches()).values()
    methods = [patch.method for patch in patches]
    module.forward = forward.__func__
    for patch in patches:
        if isinstance(patch.below, MethodType) and patch.below not in methods:
            function: Any = patch.below.__func__
            while function is not type(module).forward and hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            patch.below = None if function is type(module).forward else MethodType(function, module)


def _drop_removed(module: nn.Module) -> None:
    """Take the methods of removed patches off a module, but for those that another library has wrapped."""
    _follow_unwrapping(module)
    patches = vars(module).get(_ATTRIBUTE, _Patches())
    for key, patch in [*patches.items()][::-1]:
        above = next((other for other in patches.values() if other.below == patch.method), None)
        if patch.is_on or (above is None and vars(module).get("forward") != patch.method):
            continue
        if above is not None:
            above.below = patch.below
        elif patch.below is None:
            del module.forward
        else:
            module.forward = patch.below
        del patches[key]
    if _ATTRIBUTE in vars(module) and not patches:
        delattr(module, _ATTRIBUTE)


class BatchPatch(ForwardPatch):
    """
    The patch of a module whose forward gets the ids or embeddings of a batch.

    A call within a checkpoint of a user's is computed padded: its backward computes it again, when a hook, a setting
    or an [`Attachment.disabled`] block may have come or gone.
    """

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if retrieve_all_functorch_interpreters():  # within `torch.func`
            with self.attachment.transformed():
                return super().call(*args, **kwargs)
        if in_checkpoint():
            with self.attachment.checkpointed():
                return super().call(*args, **kwargs)
        return super().call(*args, **kwargs)


_IN_CHECKPOINT = "a torch checkpoint around the model recomputes it in backward. Checkpoint its layers"


class RunnerPatch(ForwardPatch):
    """Passes forwards of padded batches to the runner of the [`Context`], if there is one."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        runner = context().runner
        if runner is None or not self.attachment.enabled:
            return self.wrapped(*args, **kwargs)
        call = bind(self.wrapped, args, kwargs) if args else kwargs
        with within(runner=None):  # the modules inside of this one have such a patch, too
            if reason := _IN_CHECKPOINT if in_checkpoint() else _why_no_batch(call):
                runner.leave(self.module, call, reason)
                return self.wrapped(*args, **kwargs)
            if call.get("return_dict") is not False:
                return runner.run(self.module, self.wrapped, call)
            return runner.run(self.module, self.wrapped, call | {"return_dict": True}).to_tuple()


def _why_no_batch(call: dict[str, Any]) -> str | None:
    """Why a model's arguments are not a padded batch whose rows can be computed separately; `None` if they are."""
    ids, mask = call.get("input_ids"), call.get("attention_mask")
    tokens = ids if ids is not None else call.get("inputs_embeds")
    if has_cache(call):
        return "it has a cache (`use_cache=True`, or an earlier one). Leave the cache out of a loss"
    if tokens is None or tokens.dim() != (2 if tokens is ids else 3):
        return (
            "it has neither `input_ids` of shape `(B, L)` nor `inputs_embeds` of shape `(B, L, H)`. Pass one of them"
        )
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2]):
        return "its `attention_mask` is not of shape `(B, L)`. Pass such a mask"
    return None


def in_backward() -> bool:
    """Whether a backward runs in this thread, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether this thread is within a checkpoint of torch around a model, or its recomputation; not one of ours."""
    # In torch 2.6 such calls are packed, and an error of torch says so if their backward differs.
    return bool(checkpoint_state()[1]) and not context().own_checkpoint


def checkpoint_state() -> tuple[bool, tuple[Any, ...]]:
    """What a checkpoint of torch changes: whether gradients are enabled (a reentrant one), or its hooks."""
    top_hooks = vars(vars(torch._C)["_autograd"]).get("_top_saved_tensors_default_hooks")  # torch 2.6 has none
    hooks = (top_hooks and top_hooks(True)) or ()
    is_checkpoint = any(hook.__module__ == checkpoint.__module__ for hook in hooks)
    return torch.is_grad_enabled(), hooks if is_checkpoint else ()


def beneath_patches(module: nn.Module, forward: Any) -> Any:
    """The `forward` of a module beneath the patches of this package: another library's, or `None` for its class's."""
    for patch in reversed(vars(module).get(_ATTRIBUTE, _Patches()).values()):
        if forward == patch.method:
            forward = patch.below
    return forward


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
    cls = _view_class(type(module), tuple(overrides))
    view = object.__new__(cls)
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
