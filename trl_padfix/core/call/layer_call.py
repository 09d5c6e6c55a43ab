"""
The running layer, for the modules inside of it.

A mixer that runs on padded rows needs the arguments of its layer, and some layers do not pass the layout on to their
attention. [`LayerPatch`] stores both while the layer runs, and when gradient checkpointing runs it again. Since
transformers 5 a layer is checkpointed inside of its own forward. The layer then runs on a view with another checkpoint
function, which sets the running layer for the recomputation too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..context import context
from ..model.inspection import bind, takes_any_argument
from ..model.older import checkpoints_in_forward
from ..model.patching import Attachment, ForwardPatch
from ..model.views import config_of
from .calls import LAYOUT, PackedCall, call_of, checkpointed_from_outside, running


__all__ = ["LayerCall", "LayerPatch", "is_checkpointed", "layer_call"]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer inside of a packed forward, with its arguments by name."""

    layer: nn.Module
    arguments: dict[str, Any]
    call: PackedCall


def layer_call(call: PackedCall | None = None) -> LayerCall | None:
    """The running call of a layer, if there is one; with `call` only one inside of that packed forward."""
    layer = context().layer
    return layer if isinstance(layer, LayerCall) and (call is None or layer.call is call) else None


class LayerPatch(ForwardPatch):
    """
    Sets the running layer for the modules inside of it, in a recomputation too.

    A submodule of a layer that is checkpointed by itself (`is_layer=False`) keeps the running call of its layer.
    """

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: Attachment, is_layer: bool = True):
        super().__init__(module, attachment)
        self.is_layer = is_layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        has_layout = LAYOUT in kwargs
        call = call_of(self, kwargs)
        if call is None:
            return self.wrapped(*args, **kwargs)
        if not takes_any_argument(self.module):
            kwargs.pop(LAYOUT, None)  # its forward would reject the keyword
        layer = None if self.is_layer else layer_call(call)
        if layer is None:
            layer = LayerCall(self.module, bind(self.wrapped, args, kwargs), call)
        with running(layer.call, layer=layer):
            return self._forward(layer, has_layout)(*args, **kwargs)

    def _forward(self, layer: LayerCall, has_layout: bool) -> Callable[..., Any]:
        """The forward of the layer; if it is checkpointed, its recomputation has the same running layer."""
        if checkpoints_in_forward():
            checkpoints = is_checkpointed(self.module)
            if checkpoints and issubclass(type(self.module), GradientCheckpointingLayer):
                # A view gets a config for packed attention by default; this one replaces the checkpoint function only.
                config = {} if config_of(self.module) is None else {"config": self.module.config}
                checkpoint = _restoring_layer(self.module._gradient_checkpointing_func, layer)
                return self.on_view(_gradient_checkpointing_func=checkpoint, **config)
        else:
            decoder = layer.call.decoder
            checkpoints = layer.call.cached("checkpointed", lambda: any(map(is_checkpointed, decoder.modules())))
        # A checkpoint around the layer calls it again with the recorded arguments only: the layout must be among them.
        if checkpoints and not has_layout:
            raise checkpointed_from_outside(self.module)
        return self.wrapped


def _restoring_layer(checkpoint: Callable[..., Any], layer: LayerCall) -> Callable[..., Any]:
    """The `checkpoint` function, changed so that a recomputation sets this running layer again."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Backward may run in another thread, whose context is empty.
        with running(layer.call, layer=layer):
            return function(*args, **kwargs)

    return lambda function, *args, **kwargs: checkpoint(partial(run, function), *args, **kwargs)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether gradient checkpointing is on for a layer, or for a decoder that checkpoints its layers."""
    return module.training and bool(getattr(module, "gradient_checkpointing", False))
