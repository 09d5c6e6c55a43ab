"""
Record the arguments with which a decoder calls its layers for padded rows, by running it with stubbed layers.

Each decoder makes the masks, biases and positions of rows in its own way. Instead of a copy of that code here, the
decoder itself runs over the rows, on a view with a stub for every layer. A stub records its arguments and returns its
hidden states. No layer computes anything, and the decoder itself is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from ..call.calls import LAYOUT, RowsCall
from ..context import outside_calls, within
from ..errors import UnpackableCallError
from ..model.inspection import bind, parameters_of
from ..model.older import mask_of_rows
from ..model.patching import ForwardPatch
from ..model.views import config_of, view_of
from .row_buckets import RowBuckets, rows_of


__all__ = ["DryRun", "LayerCalls"]

LayerCalls = dict[int, dict[str, Any]]
"""Arguments of each layer by name, by the `id` of the layer."""


class DryRun:
    """
    Runs the decoder of a patch with stubbed layers.

    Args:
        patch ([`ForwardPatch`]):
            The patch of the decoder.
        layers (`dict[str, torch.nn.Module]`):
            Its layers by their names in it.
        packed (`dict[str, Any]`):
            Its arguments for the packed row.
        last_position (`int` or `torch.Tensor`):
            Largest position of the padded call.
    """

    def __init__(
        self,
        patch: ForwardPatch,
        layers: dict[str, nn.Module],
        packed: dict[str, Any],
        last_position: int | torch.Tensor,
    ):
        self.patch, self.layers, self.last_position = patch, layers, last_position
        # Detached: a recomputation may come after the graph of the embeddings was freed, and only values are needed.
        arguments = {k: v for k, v in packed.items() if k != LAYOUT}
        self.packed = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        self.argument_names = set(packed)  # a copy, because a view of the keys would keep the packed call alive

    def __call__(self, rows: RowBuckets) -> list[LayerCalls]:
        """The arguments of the layers for the rows of each bucket."""
        return [self._layer_calls(rows, bucket) for bucket in range(len(rows.tokens))]

    def run_for_collectives(self) -> None:
        """
        Run over the packed arguments and discard the result.

        Under FSDP and ZeRO-3 modules run collectives when they are called, so all processes must call the same ones. A
        process whose batch needs no dry run calls this method while the others run theirs.
        """
        self._run(self.packed, None)

    def _layer_calls(self, rows: RowBuckets, bucket: int) -> LayerCalls:
        arguments: dict[str, Any] = tree_map(lambda x: rows_of(x, x, rows, bucket), self.packed)
        if (packed := self.packed.get("position_ids")) is not None:
            packed = packed.flatten(-2)  # `(T,)`, or `(P, T)` where a token has several positions
            # Places beyond the end of a row repeat its last token; their positions continue, as at padding.
            arguments["position_ids"] = packed[..., rows.tokens[bucket]] + rows.overhang[bucket]
        fixed = {"attention_mask": mask_of_rows(rows.tokens[bucket], self.patch.module), "use_cache": False}
        accepted = self.argument_names | parameters_of(type(self.patch.module).forward).keys()
        arguments |= {k: v for k, v in fixed.items() if k in accepted}
        positions: Any = arguments.get("position_ids")
        return self._run(arguments, RowsCall(self.patch.module, positions, self.last_position))

    def _run(self, arguments: dict[str, Any], rows_call: RowsCall | None) -> LayerCalls:
        recorded_calls: LayerCalls = {}
        forward = _forward_with_stubs(self.patch, self.layers, recorded_calls)
        try:
            with torch.no_grad(), outside_calls(), within(rows=rows_call):
                forward(**arguments)
        except Exception as error:
            # After the last layer the decoder may fail on the outputs of stubs. All calls are recorded then.
            if len(recorded_calls) == len({id(layer) for layer in self.layers.values()}):
                return recorded_calls
            if isinstance(error, ValueError | TypeError):  # most likely it unpacks another number of outputs
                raise UnpackableCallError(
                    "layers whose arguments cannot be recorded",
                    f"{type(self.patch.module).__name__} could not be run with stubs for its layers, to record how it "
                    f"calls them for whole rows ({type(error).__name__}: {error}). Train with `padding_free=False`.",
                ) from error
            raise
        return recorded_calls


OUTPUTS = {"RwkvBlock": 3}
"""The number of outputs that a decoder unpacks from a layer, by the class of the layer, where it is not 2."""


class _HiddenStates(torch.Tensor):
    """Hidden states that a decoder can use as a layer's output, whether it expects a tensor or a tuple."""

    outputs = 2

    def __getitem__(self, index: Any) -> Any:
        # Decoders that expect a tuple take `outputs[0]`; slices and masks still index the tensor.
        return self if isinstance(index, int) and index == 0 else super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        return iter((self, *([None] * (self.outputs - 1))))


class _LayerStub(nn.Module):
    """Replaces a layer: records the arguments of its call, and returns the hidden states."""

    def __init__(self, layer: nn.Module, recorded_calls: LayerCalls):
        super().__init__()
        # Bypasses `nn.Module.__setattr__`, which would register the layer as a child of the stub.
        self.__dict__.update(_layer=layer, _recorded_calls=recorded_calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)  # decoders read attributes such as `attention_type`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # not `forward`: hooks of modules must not run
        layer = self.__dict__["_layer"]
        arguments = bind(type(layer).forward.__get__(layer), args, kwargs)
        self.__dict__["_recorded_calls"].setdefault(id(layer), arguments)  # a shared layer: its first call counts
        hidden = next(v for v in arguments.values() if isinstance(v, torch.Tensor) and v.is_floating_point())
        # `hidden` may already be the `_HiddenStates` of the layer before, so the cast starts from a plain tensor.
        output = hidden.as_subclass(torch.Tensor).as_subclass(_HiddenStates)
        output.outputs = OUTPUTS.get(type(layer).__name__, 2)
        return output


def _forward_with_stubs(
    patch: ForwardPatch, layers: dict[str, nn.Module], recorded_calls: LayerCalls
) -> Callable[..., Any]:
    """The forward that `patch` wraps, on a view whose lists of layers hold stubs."""
    stubs: dict[int, _LayerStub] = {}  # one for each layer, as some models use a layer in several places

    def overrides_of(module: nn.Module, prefix: str) -> dict[str, Any]:
        """The config of `module`, and its children that hold layers, with stubs for these layers."""
        overrides: dict[str, Any] = {}
        for name, child in module.named_children():
            inside = [n for n in layers if n.startswith(f"{prefix}{name}.")]
            if not inside:
                continue
            if isinstance(child, nn.ModuleList):
                overrides[name] = nn.ModuleList(
                    stubs.setdefault(id(layer), _LayerStub(layer, recorded_calls))
                    if f"{prefix}{name}.{i}" in layers
                    else layer
                    for i, layer in enumerate(layers.get(f"{prefix}{name}.{i}", x) for i, x in enumerate(child))
                )
            else:
                overrides[name] = view_of(child, overrides_of(child, f"{prefix}{name}."))
        if (config := config_of(module)) is not None:
            # The model's own config: a view's config names packed attention, and rows need the masks of the real one.
            overrides["config"] = config
        return overrides

    return patch.on_view(**overrides_of(patch.module, ""))
