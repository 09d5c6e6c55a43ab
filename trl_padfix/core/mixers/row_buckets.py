"""
Rows for the modules that need rows.

Everything that computes each token by itself stays packed. A module that one packed row cannot serve (attention that
is written out, ALiBi, an indexer, a recurrence of its own) is handed rows: at its door the packed states become blocks
of rows of about equal length, and behind it they are packed again. What else the decoder hands to its layers (masks,
biases, positions) is what it makes for these very rows; `dry_run.py` finds that out.

A row of a block is the whole path of a segment. Where rows share a prefix, each of them computes it, and the output of
a shared token is taken from the row of the segment that it belongs to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import ModelOutput

from ..call.calls import LAYOUT, PackedCall, packed_call
from ..call.layers import LayerCall, layer_call
from ..context import outside_calls
from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from ..model.patching import ForwardPatch


__all__ = [
    "RowBuckets",
    "RowsPatch",
    "bucket_by_length",
    "calls_of_layers",
    "joined",
    "needs_whole_rows",
    "of_rows",
    "over_whole_rows",
    "row_buckets",
]


MAX_BUCKET_PADDING = 1.125
"""A block of rows holds at most this many times the tokens of its rows; what is beyond the ends of rows is waste."""


@dataclass(frozen=True, eq=False)
class RowBuckets:
    """
    The rows of a layout in blocks.

    Attributes:
        tokens (`tuple` of `torch.Tensor` of shape `(n, l)`):
            Packed tokens of each block of `n` rows. Beyond the end of a row stands its last token again: a causal
            module does not look at it, and it is never taken.
        beyond (`tuple` of `torch.Tensor` of shape `(n, l)`):
            How far beyond the end of its row each place is; 0 within.
        take (`torch.Tensor` of shape `(T,)`):
            Where each packed token is found in the outputs of all blocks, one after another.
    """

    tokens: tuple[torch.Tensor, ...]
    beyond: tuple[torch.Tensor, ...]
    take: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, *, one_block: bool = False, by_length: bool = False) -> RowBuckets:
        """The rows of the segments of `layout`: those of about one length together, of exactly one, or all."""
        device, lengths = layout.packed_index.device, list(layout.key_lengths)
        groups = (
            [list(range(len(lengths)))]
            if one_block
            else bucket_by_length(lengths, 1 if by_length else MAX_BUCKET_PADDING)
        )
        last = torch.tensor(lengths)[:, None] - 1
        first = torch.tensor([0, *lengths[:-1]]).cumsum(0)[:, None]
        ends, begin = [0] * len(lengths), 0  # where the row of a segment ends in the outputs of all blocks
        tokens, beyond = [], []
        for group in groups:
            column = torch.arange(max(lengths[s] for s in group))
            places = (first[group] + column.minimum(last[group])).to(device)
            tokens.append(places if layout.key_index is None else layout.key_index[places])
            beyond.append((column - last[group]).clamp(min=0).to(device))
            for s in group:
                ends[s], begin = begin + lengths[s], begin + len(column)
        own = [torch.arange(end - n, end) for end, n in zip(ends, layout.query_lengths, strict=True)]
        return cls(tuple(tokens), tuple(beyond), torch.cat(own).to(device))

    def gather(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """Values `(1, T, ...)` of the tokens of a block, `(n, l, ...)`."""
        index = self.tokens[block]
        return x[0].index_select(0, index.flatten()).unflatten(0, index.shape)

    def scatter(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Values `(n, l, ...)` of every block to `(1, T, ...)`."""
        flat = [part.flatten(0, 1) for part in parts]
        return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, self.take).unsqueeze(0)


def bucket_by_length(lengths: list[int], beyond: float = MAX_BUCKET_PADDING) -> list[list[int]]:
    """Indices of `lengths` in groups that, each padded to its longest, hold at most `beyond` times their tokens."""
    groups: list[list[int]] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and lengths[i] * (len(groups[-1]) + 1) <= beyond * (total + lengths[i]):
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return groups


def row_buckets(call: PackedCall, one_block: bool = False) -> RowBuckets:
    """The blocks of rows of a packed forward."""
    return call.once(("rows", one_block), lambda: RowBuckets.of(call.layout, one_block=one_block))


def calls_of_layers(call: PackedCall, one_block: bool = False) -> list[dict[int, dict[str, Any]]]:
    """How the decoder calls its layers for the rows of each block: arguments by name, by the `id` of the layer."""
    return call.once(("calls of layers", one_block), lambda: call.dry_run(row_buckets(call, one_block)))


class RowsPatch(ForwardPatch):
    """Hands a module that mixes tokens rows, and packs its output again."""

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: Any, one_block: bool = False):
        super().__init__(module, attachment)
        self.one_block = one_block

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = kwargs.pop(LAYOUT, None) or packed_call(self.attachment.decoder)
        if call is None:
            return self.wrapped(*args, **kwargs)
        frame = layer_call(call)
        if frame is None:
            raise PaddingRemovalError(
                f"{type(self.module).__name__} was called outside of the layers of its decoder, and it needs rows, "
                "which are made for the layer that it is part of. Train this model with `padding_free=False`."
            )
        one_block = self.one_block or call.one_block
        rows, outputs = row_buckets(call, one_block), []
        for block, made in enumerate(calls_of_layers(call, one_block)):
            pick = partial(_argument, rows=rows, block=block, frame=frame, made=made.get(id(frame.layer), {}))
            block_args = [pick(None, value) for value in args]
            block_kwargs = {name: pick(name, value) for name, value in kwargs.items()}
            with outside_calls():
                outputs.append(self.wrapped(*block_args, **block_kwargs))
        return joined(outputs, rows)


def _argument(
    name: str | None, value: Any, *, rows: RowBuckets, block: int, frame: LayerCall, made: dict[str, Any]
) -> Any:
    """
    An argument of a module in a layer for the rows of a block.

    What the layer hands on as it was given is what the decoder hands to the layer for these rows (`made`); what the
    layer has computed is there for each token, and follows the tokens.
    """
    given = frame.arguments
    for key in sorted(given, key=lambda key: key != name):  # that of the same name first
        if given[key] is value and (value is not None or key == name):
            return of_rows(value, made.get(key), rows, block)
    again = partial(_argument, name, rows=rows, block=block, frame=frame, made=made)
    if isinstance(value, dict):
        return {k: again(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        values: Any = value
        return type(values)(again(v) for v in values)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    found = next((b for a, b in _counterparts(given, made) if a is value), value)
    return of_rows(value, found, rows, block)


def _counterparts(given: Any, made: Any) -> Iterator[tuple[Any, Any]]:
    """What stands in `given` beside what stands there in `made`, in dictionaries and sequences."""
    pairs: Any = ()
    if isinstance(given, dict) and isinstance(made, dict):
        pairs = [(given[k], made[k]) for k in given if k in made]
    elif isinstance(given, list | tuple) and isinstance(made, list | tuple):
        pairs = zip(given, made, strict=False)
    for pair in pairs:
        yield pair
        yield from _counterparts(*pair)


def of_rows(value: Any, made: Any, rows: RowBuckets, block: int) -> Any:
    """Values of each token follow the tokens; all else is as the decoder makes it for the rows."""
    if isinstance(value, dict):
        others = made if isinstance(made, dict) else {}
        return {k: of_rows(v, others.get(k), rows, block) for k, v in value.items()}
    if type(value) in (list, tuple):
        others: Any = made if isinstance(made, list | tuple) and len(made) == len(value) else [None] * len(value)
        return type(value)(of_rows(v, other, rows, block) for v, other in zip(value, others, strict=True))
    shape = tuple(rows.tokens[block].shape)
    packed = isinstance(value, torch.Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (1, len(rows.take))
    is_same = made is None or made is value
    if packed and (is_same or (isinstance(made, torch.Tensor) and made.shape == (*shape, *value.shape[2:]))):
        return rows.gather(value, block)
    return made


def joined(outputs: list[Any], rows: RowBuckets) -> Any:
    """The outputs of all blocks as one of the packed row."""
    first = outputs[0]
    if isinstance(first, nn.Parameter):
        return first  # a bias that the layer is to add (GPT-NeoX Japanese)
    if isinstance(first, torch.Tensor):
        shapes = [tuple(index.shape) for index in rows.tokens]
        if all(tuple(output.shape[:2]) == shape for output, shape in zip(outputs, shapes, strict=True)):
            return rows.scatter(outputs)
        return None  # attention weights: a packed forward has none
    if isinstance(first, ModelOutput):
        return type(first)(**{name: joined([output[name] for output in outputs], rows) for name in first})
    if isinstance(first, list | tuple):
        return type(first)(joined([output[i] for output in outputs], rows) for i in range(len(first)))
    return first if len(outputs) == 1 or first is None else None


def needs_whole_rows(decoder: nn.Module) -> str:
    """Why a decoder is given whole rows; empty if it is not."""
    prompt_length = getattr(decoder, "prompt_length", 0)
    if prompt_length:
        return f"puts `prompt_length={prompt_length}` tokens of its own before every row"
    if "patch_lengths" in inspect.signature(decoder.forward).parameters:
        return "groups the tokens of a row into patches"
    return ""


def over_whole_rows(forward: Callable, call: dict[str, Any], layout: Layout) -> Any:
    """The output of a decoder, packed, for the rows of a batch that shares none; `call` are its padded arguments."""
    rows = RowBuckets.of(layout, by_length=True)
    padded = {k for k, v in call.items() if isinstance(v, torch.Tensor) and tuple(v.shape[:2]) == layout.batch_shape}
    outputs = []
    for tokens in rows.tokens:
        places = layout.packed_index[tokens]
        given = {k: v.flatten(0, 1)[places] if k in padded else v for k, v in call.items() if k != "attention_mask"}
        outputs.append(forward(**given))
    return joined(outputs, rows)
