"""
How a decoder calls its layers for rows.

Masks, biases and positions of rows are made by each decoder in its own way. Instead of knowing these ways, the decoder
is run over the rows with its layers left out: on a view of it, every layer is replaced by a stub that notes what it is
called with and hands its hidden states on. No layer computes anything, and the decoder itself is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..call.arguments import bind
from ..call.calls import LAYOUT, RowsCall
from ..context import outside_calls, within
from ..model.older import mask_of_rows
from ..model.patching import ForwardPatch
from ..model.views import view_of
from .row_buckets import RowBuckets, of_rows


__all__ = ["DryRun", "LayerCalls"]

LayerCalls = dict[int, dict[str, Any]]
"""Arguments of each layer by name, by the `id` of the layer."""


class DryRun:
    """
    Runs the decoder of a patch with its layers left out.

    `packed` are its arguments for the packed tokens, `last_position` is the largest position of the padded call.
    """

    def __init__(
        self,
        patch: ForwardPatch,
        layers: dict[str, nn.Module],
        packed: dict[str, Any],
        last_position: int | torch.Tensor,
    ):
        self.patch, self.layers, self.last_position = patch, layers, last_position
        # What is recomputed may come after the graph of the embeddings is gone; their values are all that is asked.
        arguments = {k: v for k, v in packed.items() if k != LAYOUT}
        self.packed = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        self.accepted = packed.keys() | inspect.signature(type(patch.module).forward).parameters.keys()

    def __call__(self, rows: RowBuckets) -> list[LayerCalls]:
        return [self._over(rows, block) for block in range(len(rows.tokens))]

    def as_called(self) -> None:
        """Run over the arguments as they are, to no end but to call the same parts as processes that need it."""
        self._calls(self.packed, None)

    def _over(self, rows: RowBuckets, block: int) -> LayerCalls:
        given = {k: of_rows(v, v, rows, block) for k, v in self.packed.items()}
        if (packed := self.packed.get("position_ids")) is not None:
            packed = packed.flatten(-2)  # `(T,)`, or `(n, T)` where a token has several
            given["position_ids"] = packed[..., rows.tokens[block]] + rows.beyond[block]
        fixed = {"attention_mask": mask_of_rows(rows.tokens[block], self.patch.module), "use_cache": False}
        given |= {k: v for k, v in fixed.items() if k in self.accepted}
        positions: Any = given.get("position_ids")
        return self._calls(given, RowsCall(self.patch.module, positions, self.last_position))

    def _calls(self, given: dict[str, Any], rows_call: RowsCall | None) -> LayerCalls:
        for outputs in _OUTPUTS:
            seen: LayerCalls = {}
            forward = _forward_with_stubs(self.patch, self.layers, seen, outputs)
            try:
                with torch.no_grad(), outside_calls(), within(rows=rows_call):
                    forward(**given)
            except Exception as error:
                if isinstance(error, ValueError | TypeError) and "unpack" in str(error):
                    continue  # the layers return another number of outputs
                # Behind the last layer the decoder may want more than the stubs give.
                if len(seen) < len({id(layer) for layer in self.layers.values()}):
                    raise
            return seen
        raise AssertionError("unreachable: a decoder unpacks between one and four outputs of a layer")


class _Hidden(torch.Tensor):
    """Hidden states that pass for the outputs of a layer, whether these are a tensor or a tuple."""

    outputs = 2

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return iter((self, *([None] * (self.outputs - 1))))


_OUTPUTS = tuple(type("_Hidden", (_Hidden,), {"outputs": n}) for n in (2, 3, 4, 1))


class _Stub(nn.Module):
    """Stands for a layer: notes how it is called, and returns the hidden states."""

    def __init__(self, layer: nn.Module, seen: LayerCalls, hidden: type[_Hidden]):
        super().__init__()
        self.__dict__.update(_layer=layer, _seen=seen, _hidden=hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # without the hooks of a module
        layer = self.__dict__["_layer"]
        arguments = bind(type(layer).forward.__get__(layer), args, kwargs)
        self.__dict__["_seen"].setdefault(id(layer), arguments)
        hidden = next(v for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
        return hidden.as_subclass(torch.Tensor).as_subclass(self.__dict__["_hidden"])


def _forward_with_stubs(patch: ForwardPatch, layers: dict[str, nn.Module], seen: LayerCalls, hidden: type) -> Callable:
    """The forward that `patch` wraps, on a view whose lists of layers hold stubs."""
    stubs: dict[int, _Stub] = {}

    def replaced(module: nn.Module, prefix: str) -> dict[str, Any]:
        """The config of `module`, and its children that hold layers, as they are on its view."""
        held: dict[str, Any] = {}
        for name, child in module.named_children():
            inside = [n for n in layers if n.startswith(f"{prefix}{name}.")]
            if not inside:
                continue
            if isinstance(child, nn.ModuleList):
                held[name] = nn.ModuleList(
                    stubs.setdefault(id(layer), _Stub(layer, seen, hidden))
                    if f"{prefix}{name}.{i}" in layers
                    else layer
                    for i, layer in enumerate(child)
                )
            else:
                held[name] = view_of(child, replaced(child, f"{prefix}{name}."))
        if hasattr(module, "config"):
            held["config"] = module.config
        return held

    return patch.on_view(**replaced(patch.module, ""))
