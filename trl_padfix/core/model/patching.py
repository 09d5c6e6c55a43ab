"""Patches on the forwards of modules, which go on and off together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..context import context, within
from ..errors import PaddingRemovalError
from .views import bound_to_view


if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["Attachment", "ForwardPatch", "beneath_patches"]


class Attachment:
    """Patches on a model that go on and off together; a context manager that detaches at its end."""

    def __init__(self) -> None:
        self.is_trainers = False  # made by a trainer, and replaced by the next one on the same model
        self._patches: list[ForwardPatch] = []
        self._recomputable: set[int] = set()  # packed forwards that gradient checkpointing may compute again
        self._removed = False

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Detach, but for modules that gradient checkpointing has yet to call again: these when its graph is gone."""
        self._removed = True
        needed = [patch for patch in self._patches if self._recomputable and patch.serves_recomputation]
        for patch in reversed(self._patches):
            if patch not in needed:
                patch.take_off()
        self._patches = needed

    @property
    def enabled(self) -> bool:
        """Whether calls of this thread are packed; see [`Attachment.disabled`]."""
        return not self._removed and self not in context().disabled

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


class ForwardPatch:
    """
    `module.forward`, wrapped for as long as the patch is on.

    The patch is an instance attribute of the module and looks the wrapped forward up anew in each call: a deep copy of
    the module is a patched module of its own, a class swapped underneath (FSDP2) is followed, and a patch that
    somebody else put on top is left in place when this one goes.
    """

    serves_recomputation = False
    """Whether gradient checkpointing calls the patched module again, perhaps after the handle was removed."""

    def __init__(self, module: nn.Module, attachment: Any):
        self.module: Any = module
        self.attachment, self.below = attachment, None

    runs_on_view = False
    """Whether packed forwards run the module on a view of it."""

    def put_on(self) -> None:
        self.below = self.module.__dict__.get("forward")
        if self.runs_on_view:
            self.on_view()
        self.module.forward = self

    @property
    def __signature__(self) -> inspect.Signature:
        # `generate` and `Trainer` read the signature of `model.forward`.
        return inspect.signature(self.wrapped)

    @property
    def wrapped(self) -> Any:
        return self.below if self.below is not None else type(self.module).forward.__get__(self.module)

    @property
    def __func__(self) -> Callable:
        return self.wrapped.__func__  # TRL 1.9 reads the signature of the function of what it takes for a method

    def on_view(self, **held: Any) -> Callable:
        """The forward as a packed forward calls it: past other patches of ours, on a view of the module."""
        below = beneath_patches(self.below)
        forward = bound_to_view(self.module, below, **held)
        if forward is None:
            raise PaddingRemovalError(
                f"The forward of {type(self.module).__name__} was replaced before padding removal was attached, by "
                f"`{getattr(below, '__qualname__', type(below).__name__)}`, which hides the module that it calls. "
                "Attach first (`remove_padding(model)`), and let the other library wrap the model afterwards."
            )
        return forward

    @torch.compiler.disable  # dynamo takes the wrapped forward for the patch itself, and recurses
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:
            args = args[1:]  # accelerate's `unwrap_model(keep_fp32_wrapper=False)` makes a method of what it finds
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The forward while the patch is on."""
        return self.packed(*args, **kwargs) if self.attachment.enabled else self.wrapped(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        """The forward while padding removal is on."""
        raise NotImplementedError

    def take_off(self) -> None:
        above, current = None, self.module.__dict__.get("forward")
        while isinstance(current, ForwardPatch) and current is not self:
            above, current = current, current.below
        if current is not self:
            return  # somebody else wrapped this patch: it stays below theirs, and passes every call on
        if above is not None:
            above.below = self.below
        elif self.below is None:
            del self.module.forward
        else:
            self.module.forward = self.below


def beneath_patches(forward: Any) -> Any:
    """Of the forward in the `__dict__` of a module what others than patches of ours have put there, if anybody has."""
    while isinstance(forward, ForwardPatch):
        forward = forward.below
    return forward
