"""
Patches of the forwards of modules, and the attachment that puts them on and takes them off.

One method runs all patches of a module: the last patch that was put on calls the one before it, and so on; the first
one calls the forward that was there before. [`_Place`] is this method, `module.forward`, with its patches. The module
holds the place in an attribute, where the method looks it up at each call.

- No other library: the last patch that is taken off takes the method with it.
- Another library wraps the method later, as accelerate does for mixed precision. The method stays beneath the wrapper,
  also without patches. New patches join it there if the wrapper is accelerate's. Otherwise they get a second place,
  above the wrapper. A packed forward runs the wrapper on a view of the module, for which the method skips its patches.
- accelerate's wrapper was there first. Then `unwrap_model(model, keep_fp32_wrapper=False)` does not find it, makes a
  method of the method, and calls pass the module twice. [`_follow_unwrapping`] removes the wrapper.
- A deep copy of the module: the method finds the copy's place, whose patches belong to a copy of the attachment.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

from ..context import context, in_backward, in_checkpoint, within
from ..errors import PaddingRemovalError
from .inspection import TRUSTED_WRAPPERS, bind, is_of, name_of
from .older import has_cache
from .views import bound_to_view, viewed_module


if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["PLACES", "Attachment", "BatchPatch", "ForwardPatch", "RunnerPatch", "is_patched_only", "patches_on"]

State = Literal["attached", "in use", "paused", "copied", "taken over", "detached", "off by TRL_PADFIX_OFF"]
"""
The states of an [`Attachment`].

- `"attached"`: by a user, a callback or a check, until they remove it.
- `"in use"`, `"paused"`: by a trainer, which computes now, or does not. A paused model computes as before attachment.
- `"copied"`: with a deep copy of the model. Its patches work, and nobody holds it.
- `"taken over"`: detached for another trainer. Its own trainer attaches again when it computes again.
- `"detached"`: removed by its owner.
- `"off by TRL_PADFIX_OFF"`: never put on.

Trainers take over what is in use, paused or copied; `remove_padding` takes over what is paused or copied.
"""


class Attachment:
    """The patches of `model`, put on and taken off together; a context manager that detaches at its end."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.state: State = "attached"
        self._patches: list[ForwardPatch] = []
        self._recomputable: set[int] = set()  # ids of packed forwards that gradient checkpointing may recompute

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
        self.state = "taken over"
        self.remove()

    def __enter__(self) -> Self:
        if self.is_detached:
            raise ValueError("This handle was removed: attach again with `remove_padding(model)`.")
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """
        Detach.

        Patches that gradient checkpointing still needs stay until the graph of the last packed forward is gone.
        """
        self.state = self.state if self.is_detached else "detached"
        needed = [patch for patch in self._patches if self._recomputable and patch.serves_recomputation]
        for patch in reversed(self._patches):  # a module may have several: the outermost first
            if patch not in needed:
                patch.take_off()
        self._patches = needed

    @property
    def is_detached(self) -> bool:
        """Whether it was removed, by its owner or for another trainer."""
        return self.state in ("taken over", "detached")

    @property
    def enabled(self) -> bool:
        """Whether calls of this thread are packed; see [`Attachment.disabled`]."""
        # A backward recomputes what the trainer has computed packed, and may come after the pause.
        return not (self.is_detached or (self.state == "paused" and not in_backward()) or self in context().disabled)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute as before attachment until the block ends, in this thread."""
        with within(disabled=context().disabled | {self}):
            yield


class ForwardPatch:
    """A wrapper of `module.forward` for as long as it is on."""

    serves_recomputation = False
    """Whether recomputed forwards need the patch, perhaps after the handle was removed."""

    runs_on_view = False
    """Whether packed forwards run the module on a view of it."""

    place: _Place
    """Where the patch was put on."""

    def __init__(self, module: nn.Module, attachment: Attachment):
        self.module: Any = module
        self.attachment: Any = attachment  # `Any`, because most patches need the fields of a `PaddingRemoval`

    def put_on(self) -> None:
        self.place = _place_for(self.module)
        if self.runs_on_view:
            self.on_view()  # raises now, not in the first forward, if there can be no view
        self.place.put_on(self)

    def take_off(self) -> None:
        """Remove this patch from its module."""
        self.place.patches = tuple(patch for patch in self.place.patches if patch is not self)
        _remove_unused_places(self.module)

    @property
    def wrapped(self) -> Callable[..., Any]:
        """The patch beneath this one, or the forward beneath all of them."""
        patches = self.place.patches  # without this patch, if another thread has taken it off during the call
        beneath = patches[: patches.index(self)] if self in patches else ()
        return beneath[-1] if beneath else self.place.forward

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return bind(self.place.method, args, kwargs)

    def on_view(self, **overrides: Any) -> Callable:
        """
        The forward for packed calls: on a view of the module, without other patches of this package.

        Raises:
            PaddingRemovalError: If another library replaced the forward and hides the module that it calls.
        """
        below = self.place.below
        forward = bound_to_view(self.module, below, **overrides)
        if forward is None:
            raise PaddingRemovalError(
                f"The forward of {type(self.module).__name__} was replaced before padding removal was attached, by "
                f"`{name_of(below)}`, which hides the module that it calls. Set it later: between the "
                "creation of one of our trainers and `train()`; if a library sets it, after `remove_padding(model)`. "
                f"Or make it the `forward` of a subclass of {type(self.module).__name__}, with the same parameters."
            )
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():  # a trace would keep the layout of its example
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


def patches_on(module: nn.Module) -> list[ForwardPatch]:
    """The patches of this package on a module, the outermost first, also those beneath wrappers of other libraries."""
    return [patch for place in reversed(_places_on(module).values()) for patch in reversed(place.patches)]


def is_patched_only(module: nn.Module) -> bool:
    """Whether no other library has replaced the forward of a module; patches of this package do not count."""
    places = _places_on(module).values()
    forwards = {vars(module).get("forward"), *(place.below for place in places)}
    return forwards <= {None, *(place.method for place in places)}


# Places of patches


class _Place:
    """A method of a module that runs patches, and the forward beneath them."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.below: Any = vars(module).get("forward")  # what an instance attribute held; `None` without one
        self.patches: tuple[ForwardPatch, ...] = ()  # never changed but replaced: another thread may read it
        self.method = MethodType(_function(module, self.forward), module)

    @property
    def forward(self) -> Any:
        """The forward beneath all patches."""
        return self.below if self.below is not None else type(self.module).forward.__get__(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Place:
        # In a copy of a part of a model (PEFT copies heads) there are no patches: they would copy the whole model.
        patches = tuple(patch for patch in self.patches if id(patch.attachment.model) in memo)
        memo[id(self)] = copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self) | {"patches": patches}, memo))
        return copied

    def put_on(self, patch: ForwardPatch) -> None:
        places, function = _places_on(self.module), self.method.__func__
        if function not in places:
            places[function] = self
            vars(self.module).update({PLACES: places, "forward": self.method})
        self.patches = (*self.patches, patch)


class _Places(dict[Any, _Place]):
    """
    The places on a module by the functions of their methods, in an attribute of the module; the last is the outermost.

    A deep copy of the module has copies of them. A pickle of it has none, as its class has none.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> _Places:
        memo[id(self)] = copied = _Places()
        copied.update({function: copy.deepcopy(place, memo) for function, place in self.items()})
        return copied

    def __reduce__(self) -> tuple[type[dict], tuple]:
        return dict, ()


PLACES = "_trl_padfix_patches"
"""The attribute of a module with its places."""


def _places_on(module: nn.Module) -> _Places:
    return vars(module).get(PLACES) or _Places()


def _function(patched: nn.Module, forward_beneath: Any) -> Callable:
    """The function of the method of a place, with the signature of the forward beneath it."""
    is_own = isinstance(forward_beneath, MethodType) and forward_beneath.__self__ is patched
    beneath: Any = forward_beneath.__func__ if is_own else forward_beneath  # the function may run a copy of the module

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is module:
            _follow_unwrapping(module)
            args = args[1:]
        place = _places_on(module).get(forward)
        if place is None:  # code has kept the method, and the place was removed
            return beneath(module, *args, **kwargs) if is_own else beneath(*args, **kwargs)
        if viewed_module(module) is module:
            patches = place.patches
            return (patches[-1] if patches else place.forward)(*args, **kwargs)
        # Beneath the wrapper of another library, which a packed forward of a second place runs on a view.
        return (type(place.module).forward if place.below is None else place.below.__func__)(module, *args, **kwargs)

    signature = inspect.signature(forward_beneath)
    parameters = {"self": inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)} | signature.parameters
    vars(forward)["__signature__"] = signature.replace(parameters=[*parameters.values()])
    return forward


def _place_for(module: nn.Module) -> _Place:
    """The place of a new patch: one whose method runs first, but for accelerate's mixed precision; or a new one."""
    _follow_unwrapping(module)
    places = _places_on(module)
    function: Any = vars(module).get("forward")
    while function not in places:
        if isinstance(function, MethodType):
            function = function.__func__
        elif places and is_of(function, TRUSTED_WRAPPERS):
            function = vars(function).get("__wrapped__")
        else:
            return _Place(module)
    return places[function]


def _follow_unwrapping(module: nn.Module) -> None:
    """Remove accelerate's mixed precision beneath the patches of a module that accelerate has unwrapped."""
    forward: Any = vars(module).get("forward")
    # `unwrap_model(keep_fp32_wrapper=False)` makes a method of the method of the outermost place.
    if not (isinstance(forward, MethodType) and isinstance(forward.__func__, MethodType)):
        return
    module.forward = forward.__func__
    for place in _places_on(module).values():
        if isinstance(place.below, MethodType):
            function: Any = place.below.__func__
            while function is not type(module).forward and hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            place.below = None if function is type(module).forward else MethodType(function, module)


def _remove_unused_places(module: nn.Module) -> None:
    """Remove places without patches from a module, but for those whose method another library has wrapped."""
    _follow_unwrapping(module)
    places = _places_on(module)
    for function, place in [*places.items()][::-1]:
        if not place.patches and vars(module).get("forward") == place.method:
            del module.forward, places[function]
            if place.below is not None:
                module.forward = place.below
    if not places:
        vars(module).pop(PLACES, None)


# Kinds of patches


class BatchPatch(ForwardPatch):
    """
    The patch of a module whose forward gets the ids or embeddings of a batch.

    A call within `torch.func` is computed padded, and a call within a checkpoint of a user's, too: its backward
    computes it again, when a hook, a setting or an [`Attachment.disabled`] block may have come or gone.
    """

    @torch.compiler.disable
    def _untraced(self, *args: Any, **kwargs: Any) -> Any:
        self.attachment.say_once(
            f"`torch.compile` compiles nothing of {type(self.module).__name__}, because padding removal is attached. "
            "Compile its layers instead: `for layer in model.get_decoder().layers: layer.compile()` (in a trainer: "
            "`torch_compile=True`)."
        )
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        reason = _IN_FUNC if retrieve_all_functorch_interpreters() else _IN_CHECKPOINT if in_checkpoint() else None
        if reason is None or not self.attachment.enabled:
            return super().call(*args, **kwargs)
        # A backward computes a call again that has been counted.
        with self.attachment.disabled() if in_backward() else self.attachment.padded(reason):
            return super().call(*args, **kwargs)


_IN_FUNC = "tensors of `torch.func` (`grad`, `vmap`), from whose values no layout can be built"

_IN_CHECKPOINT = "a checkpoint around it, whose backward recomputes the whole model. Checkpoint its layers instead"


class RunnerPatch(ForwardPatch):
    """Passes forwards of padded batches to the runner of the [`Context`], if there is one."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        runner = context().runner
        if runner is None or not self.attachment.enabled:
            return self.wrapped(*args, **kwargs)
        call = self.bind(args, kwargs) if args else kwargs
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
        return "it has neither `input_ids` `(B, L)` nor `inputs_embeds` `(B, L, H)`. Pass one of them"
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == tokens.shape[:2]):
        return "its `attention_mask` is not of shape `(B, L)`. Pass such a mask"
    return None
