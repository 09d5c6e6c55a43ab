"""
The layer that is running, for the modules within it.

A module that is handed rows has to know what its layer was called with, and some layers do not hand the layout down to
their attention. [`LayerPatch`] keeps both for as long as the layer runs, and gradient checkpointing takes them along:
since transformers 5 the checkpoint sits inside the forward of a layer, so the function that makes it is given to the
layer on a view.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..context import context, within
from ..errors import PaddingRemovalError
from ..model.older import checkpoints_in_forward
from ..model.patching import ForwardPatch
from .arguments import bind
from .calls import LAYOUT, PackedCall, packed_call


__all__ = ["LayerCall", "LayerPatch", "hands_arguments_on", "layer_call", "takes_any_argument"]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer within a packed forward, its arguments by name."""

    layer: nn.Module
    arguments: dict[str, Any]
    call: PackedCall


def layer_call(call: PackedCall | None = None) -> LayerCall | None:
    """The call of a layer that is running, if one is, and if it is within the packed forward `call`."""
    frame = context().layer
    return frame if frame is not None and (call is None or frame.call is call) else None


def takes_any_argument(module: nn.Module) -> bool:
    """Whether the forward of a module takes keyword arguments that it does not name."""
    return bool(_code(type(module)).co_flags & inspect.CO_VARKEYWORDS)


def hands_arguments_on(module: nn.Module) -> bool:
    """Whether the forward of a module takes keyword arguments that it does not name, and calls something with them."""
    expands = any(i.opname == "CALL_FUNCTION_EX" for i in dis.get_instructions(_code(type(module))))
    return takes_any_argument(module) and expands


class LayerPatch(ForwardPatch):
    """
    Keeps the call of a layer for the modules within it, in recomputation too.

    A part of a layer that is checkpointed by itself (not `is_layer`) leaves the call of its layer in place.
    """

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: Any, is_layer: bool = True):
        super().__init__(module, attachment)
        self.is_layer = is_layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        is_handed = LAYOUT in kwargs
        call = kwargs.get(LAYOUT) or packed_call(self.attachment.decoder)
        if call is None:
            return self.wrapped(*args, **kwargs)
        if not takes_any_argument(self.module):
            kwargs.pop(LAYOUT, None)
        frame = None if self.is_layer else layer_call(call)
        if frame is None:
            frame = LayerCall(self.module, bind(self.wrapped, args, kwargs), call)
        with within(layer=frame, packed=frame.call):
            return self._forward(frame, is_handed)(*args, **kwargs)

    def _forward(self, frame: LayerCall, is_handed: bool) -> Callable:
        """The forward of the layer; where it is checkpointed, one whose recomputation is within `frame` too."""
        if checkpoints_in_forward():
            is_checkpointed = _checkpoints(self.module)
            if is_checkpointed and issubclass(type(self.module), GradientCheckpointingLayer):
                own = {"config": self.module.config} if hasattr(self.module, "config") else {}
                checkpoint = _carrying(self.module._gradient_checkpointing_func, frame)
                return self.on_view(_gradient_checkpointing_func=checkpoint, **own)
        else:
            decoder = frame.call.decoder
            is_checkpointed = frame.call.once("checkpointed", lambda: any(map(_checkpoints, decoder.modules())))
        # The layer is called anew by a checkpoint around it, which knows what the layer was handed, and nothing else.
        if is_checkpointed and not is_handed:
            raise PaddingRemovalError(
                f"{type(self.module).__name__} is checkpointed from outside and is not handed the layout of the "
                "packed batch, so its recomputation could not keep the rows apart. Update transformers to 5.23 or "
                "later, or set one of `padding_free` and `gradient_checkpointing` to False."
            )
        return self.wrapped


def _carrying(checkpoint: Callable, frame: LayerCall) -> Callable:
    """`checkpoint`, whose recomputation is within `frame`, whatever thread runs it."""

    def run(function: Callable, *args: Any, **kwargs: Any) -> Any:
        with within(layer=frame, packed=frame.call):
            return function(*args, **kwargs)

    return lambda function, *args, **kwargs: checkpoint(partial(run, function), *args, **kwargs)


def _checkpoints(module: nn.Module) -> bool:
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


@cache
def _code(cls: type[nn.Module]) -> Any:
    return inspect.unwrap(cls.forward).__code__
