"""
Buckets of rows, for the modules that cannot run on a packed row.

Modules that compute each token by itself stay packed. A module that cannot run on a packed row (attention written out,
ALiBi, an indexer, a recurrence of its own) runs on rows: its packed inputs are gathered into buckets of rows of about
equal length, and its outputs are packed again. A row of a bucket is the whole path of a segment. Where rows share a
prefix, each row computes it, and the output of a shared token is taken from the row of the segment that holds the
token.

The other arguments of its layer (masks, biases, positions) are those that the decoder makes for these rows, each
decoder in its own way. [`DryRun`] records them: the decoder itself runs over the rows, on a view with a stub for every
layer. A stub records its arguments and returns its hidden states. No layer computes anything, and the decoder is not
changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only, tree_structure
from transformers.utils import ModelOutput

from ..call.calls import CALL, LayerCall, PackedCall, RowsCall, call_of, layer_call
from ..context import outside_calls, within
from ..errors import PaddingRemovalError, UnpackableCallError
from ..layout.layout import Layout
from ..model.inspection import bind, parameters_of
from ..model.older import mask_of_rows
from ..model.patching import Attachment, ForwardPatch
from ..model.views import config_of, view_of


__all__ = [
    "DryRun", "LayerCalls", "RowBuckets", "RowsPatch", "bucket_by_length", "calls_of_layers", "row_buckets", "rows_of",
]  # fmt: skip

MAX_BUCKET_PADDING = 1.125
"""Limit of places `(n * l)` of a bucket per token of its rows: at most 1/8 of the work is wasted on padding."""


@dataclass(frozen=True, eq=False)
class RowBuckets:
    """
    The rows of a layout in buckets.

    Example: the rows `1 2 3 4` and `1 2 5` share a prefix and pack into `1 2 3 4 | 5`, tokens 0 to 4. One bucket of
    both rows has `tokens` `[[0, 1, 2, 3], [0, 1, 4, 4]]`, `overhang` `[[0, 0, 0, 0], [0, 0, 0, 1]]` and
    `packed_from_rows` `[0, 1, 2, 3, 6]`.

    Attributes:
        tokens (`tuple` of `torch.Tensor` of shape `(n, l)`):
            Packed tokens of each bucket of `n` rows. A shorter row repeats its last token up to the length `l`: a
            causal module does not attend to these copies, and their outputs are never read.
        overhang (`tuple` of `torch.Tensor` of shape `(n, l)`):
            Distance of each place beyond the last token of its row; 0 within the row.
        packed_from_rows (`torch.Tensor` of shape `(T,)`):
            Index of each packed token in the outputs of all buckets, flattened and concatenated.
    """

    tokens: tuple[torch.Tensor, ...]
    overhang: tuple[torch.Tensor, ...]
    packed_from_rows: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, *, one_bucket: bool = False) -> RowBuckets:
        """
        The rows of the segments of `layout`: in buckets of similar length, or all rows in one bucket (`one_bucket`).
        """
        device, lengths = layout.packed_index.device, list(layout.keys.lengths)
        groups = [[*range(len(lengths))]] if one_bucket else bucket_by_length(lengths)
        last = torch.tensor(lengths)[:, None] - 1
        first = torch.tensor([0, *lengths[:-1]]).cumsum(0)[:, None]
        ends, begin = [0] * len(lengths), 0  # ends of the segments' rows in the concatenated outputs
        tokens, overhang = [], []
        for group in groups:
            column = torch.arange(max(lengths[s] for s in group))
            places = (first[group] + column.minimum(last[group])).to(device)
            tokens.append(places if layout.key_index is None else layout.key_index[places])
            overhang.append((column - last[group]).clamp(min=0).to(device))
            for s in group:
                ends[s], begin = begin + lengths[s], begin + len(column)
        # The segment's own tokens are the last ones of its path; the tokens before belong to other segments.
        index = [torch.arange(end - n, end) for end, n in zip(ends, layout.queries.lengths, strict=True)]
        return cls(tuple(tokens), tuple(overhang), torch.cat(index).to(device))

    def gather(self, x: torch.Tensor, bucket: int) -> torch.Tensor:
        """Values `(1, T, ...)` for the rows of a bucket, `(n, l, ...)`."""
        index = self.tokens[bucket]
        return x[0].index_select(0, index.flatten()).unflatten(0, index.shape)

    def scatter(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """Values `(n, l, ...)` of every bucket to `(1, T, ...)`."""
        flat = [output.flatten(0, 1) for output in outputs]
        # A single bucket needs no copy by `cat`.
        return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, self.packed_from_rows).unsqueeze(0)


def bucket_by_length(lengths: list[int]) -> list[list[int]]:
    """
    Indices of `lengths` in groups: padded to its longest, each holds at most [`MAX_BUCKET_PADDING`] times its tokens.

    Example: the lengths `16 3 18 40 17` give `[[1], [0, 4, 2], [3]]`.
    """
    groups: list[list[int]] = []
    total = 0
    # Ascending, so that each new row is the longest of its group and sets the padded length.
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and lengths[i] * (len(groups[-1]) + 1) <= MAX_BUCKET_PADDING * (total + lengths[i]):
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return groups


def row_buckets(call: PackedCall, one_bucket: bool = False) -> RowBuckets:
    """The buckets of rows of a packed forward, built once for all its mixers."""
    return call.cached(("rows", one_bucket), lambda: RowBuckets.of(call.layout, one_bucket=one_bucket))


def calls_of_layers(call: PackedCall, one_bucket: bool = False) -> list[dict[int, dict[str, Any]]]:
    """The arguments of each layer for the rows of each bucket, from a dry run: by the `id` of the layer, by name."""
    dry_run = call.dry_run
    assert dry_run is not None  # a mixer needs rows
    return call.cached(("calls of layers", one_bucket), lambda: dry_run(row_buckets(call, one_bucket)))


class RowsPatch(ForwardPatch):
    """Runs a module that mixes tokens on rows, and packs its output again."""

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: Attachment, one_bucket: bool = False):
        super().__init__(module, attachment)
        self.one_bucket = one_bucket

    def call(self, *args: Any, **kwargs: Any) -> Any:
        running = call_of(self, {})  # not by the keyword: the running layer is in this thread only
        call = kwargs.pop(CALL, None) or running
        if call is None:
            return self.wrapped(*args, **kwargs)
        if (running_layer := layer_call(call)) is None:
            raise PaddingRemovalError(
                f"{type(self.module).__name__} was called outside of the layers of its decoder. It runs on rows, and "
                "the arguments for these rows are recorded layer by layer. Train this model with `padding_free=False`."
            )
        one_bucket = self.one_bucket or call.one_bucket
        rows, outputs = row_buckets(call, one_bucket), []
        for bucket, layer_calls in enumerate(calls_of_layers(call, one_bucket)):
            recorded = layer_calls.get(id(running_layer.layer), {})
            bucket_args = [_bucket_argument(None, x, running_layer, recorded, rows, bucket) for x in args]
            bucket_kwargs = {
                name: _bucket_argument(name, x, running_layer, recorded, rows, bucket) for name, x in kwargs.items()
            }
            with outside_calls():
                outputs.append(self.wrapped(*bucket_args, **bucket_kwargs))
        return concat_outputs(outputs, rows)


def _bucket_argument(
    name: str | None, value: Any, running_layer: LayerCall, recorded: dict[str, Any], rows: RowBuckets, bucket: int
) -> Any:
    """
    The argument `name` of a module within a layer, for the rows of a bucket.

    Layers pass arguments on under other names, or parts of them (the cosines of `position_embeddings`), so these are
    compared by identity: the value `recorded` in the dry run replaces them. A tensor that the layer computed is
    gathered for the tokens of the rows.
    """
    packed = running_layer.arguments  # of the layer
    if name in packed and packed[name] is value and tree_structure(value).is_leaf():
        return rows_of(value, recorded.get(name), rows, bucket)
    counterparts = {id(a): b for a, b in _paired_leaves(packed, recorded)}

    def pick(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf  # Python shares such objects, so their identity says nothing
        return rows_of(leaf, counterparts.get(id(leaf), leaf), rows, bucket)

    return tree_map(pick, value)


def _paired_leaves(a: object, b: object) -> Iterator[tuple[Any, Any]]:
    """Pairs of leaves at the same place in `a` and `b`, which are dictionaries and sequences of one structure."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() & b.keys():
            yield from _paired_leaves(a[key], b[key])
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for x, y in zip(a, b, strict=False):
            yield from _paired_leaves(x, y)
    else:
        yield a, b


def rows_of(value: Any, dry_run_value: Any, rows: RowBuckets, bucket: int) -> Any:
    """
    The argument `value` of the packed row, for the rows of a bucket; not for lists, tuples and dictionaries.

    A tensor `(1, T, ...)` is gathered for the rows, unless the dry run made one of another shape. Every other argument
    is replaced by `dry_run_value`, which the decoder passed in the dry run over these rows.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, len(rows.packed_from_rows)):
        return dry_run_value
    if dry_run_value is None or dry_run_value is value:
        return rows.gather(value, bucket)
    # By chance a mask or bias may have a first dimension of 1 and a second of `T`: for rows it has another shape.
    shape = (*rows.tokens[bucket].shape, *value.shape[2:])
    is_by_token = isinstance(dry_run_value, torch.Tensor) and dry_run_value.shape == shape
    return rows.gather(value, bucket) if is_by_token else dry_run_value


def concat_outputs(outputs: list[Any], rows: RowBuckets) -> Any:
    """The outputs of a module for all buckets as one output for the packed row."""
    first = outputs[0]
    if isinstance(first, nn.Parameter):
        return first  # a bias that the layer adds later (GPT-NeoX Japanese)
    if isinstance(first, torch.Tensor):
        shapes = [tuple(index.shape) for index in rows.tokens]
        if all(tuple(output.shape[:2]) == shape for output, shape in zip(outputs, shapes, strict=True)):
            return rows.scatter(outputs)
        return None  # attention weights: a packed forward has none
    if isinstance(first, ModelOutput):
        return type(first)(**{name: concat_outputs([output[name] for output in outputs], rows) for name in first})
    if isinstance(first, list | tuple):
        return type(first)(concat_outputs([output[i] for output in outputs], rows) for i in range(len(first)))
    # Other objects, such as a cache, cannot be concatenated: the object of a single bucket is returned unchanged.
    return first if len(outputs) == 1 else None


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
        arguments = {k: v for k, v in packed.items() if k != CALL}
        self.packed = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)

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
        accepted = self.packed.keys() | parameters_of(type(self.patch.module).forward).keys()
        arguments |= {k: v for k, v in fixed.items() if k in accepted}
        positions: Any = arguments.get("position_ids")
        return self._run(arguments, RowsCall(self.patch.module, positions, self.last_position))

    def _run(self, arguments: dict[str, Any], rows_call: RowsCall | None) -> LayerCalls:
        recorded_calls: LayerCalls = {}
        forward = _forward_with_stubs(self.patch, self.layers, recorded_calls)
        try:
            with torch.no_grad(), outside_calls(), within(rows=rows_call):
                forward(**arguments)
            torch.clear_autocast_cache()  # of casts without a graph (pytorch#112583)
        except Exception as error:
            # After the last layer the decoder may fail on the outputs of stubs. All calls are recorded then.
            if len(recorded_calls) == len({id(layer) for layer in self.layers.values()}):
                return recorded_calls
            if isinstance(error, ValueError | TypeError):  # most likely it unpacks another number of outputs
                raise UnpackableCallError(
                    "layers whose arguments cannot be recorded",
                    f"{type(self.patch.module).__name__} could not run with placeholder layers, which record "
                    f"its layer arguments ({type(error).__name__}: {error}). Train with `padding_free=False`.",
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
    # One stub for each layer, as some models use a layer in several places.
    stubs = {layer: _LayerStub(layer, recorded_calls) for layer in layers.values()}

    def overrides_of(module: nn.Module, prefix: str) -> dict[str, Any]:
        """The config of `module`, and its children that hold layers, with stubs for these layers."""
        overrides: dict[str, Any] = {}
        for name, child in module.named_children():
            if not any(n.startswith(f"{prefix}{name}.") for n in layers):
                continue
            if isinstance(child, nn.ModuleList):
                in_list = ((layers.get(f"{prefix}{name}.{i}"), block) for i, block in enumerate(child))
                overrides[name] = nn.ModuleList(block if layer is None else stubs[layer] for layer, block in in_list)
            else:
                overrides[name] = view_of(child, overrides_of(child, f"{prefix}{name}."))
        if (config := config_of(module)) is not None:
            # The model's own config: a view's config names packed attention, and rows need the masks of the real one.
            overrides["config"] = config
        return overrides

    return patch.on_view(**overrides_of(patch.module, ""))
