"""
Attention over the segments of a layout, one function for each way to compute it.

[`attend_varlen`] calls a FlashAttention function once for all segments, [`attend_torch_varlen`] torch's own, and
[`attend_by_segment`] a model's `sdpa` or `eager` function on one block of one segment at a time. All of them gather
the keys of the segments first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.weak import TensorWeakRef
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..layout.layout import Layout


__all__ = ["GatherKeys", "attend_by_segment", "blocks", "in_attention_dtype", "sum_by_token", "visible"]

BLOCK = 1024
"""Queries per masked block: bounds the mask of a segment at `BLOCK x keys`."""


def attend_by_segment(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
    *,
    is_eager: bool,
    masks: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """
    The model's `sdpa` or `eager` function on one block of one segment at a time.

    With `masks`, one `(1, 1, queries, keys)` for each segment, these say what is seen, and nothing else.
    """
    asked = kwargs.get("sliding_window"), kwargs.get("attention_chunk_size")
    limits = [tuple(n if n is not None and n < span else None for n in asked) for span in layout.spans]
    # Without a mask `sdpa` is causal and attends from the first key on: right for a whole row only. Where at most half
    # is shared, a row made whole by queries that nobody asks for is quicker than a mask. `None`: not computed whole.
    added = [
        keys - own if masks is None and not is_eager and keys <= 2 * own and limit == (None, None) else None
        for own, keys, limit in zip(layout.query_lengths, layout.key_lengths, limits, strict=True)
    ]
    # Split rather than sliced: the gradient of a slice is as long as the whole row, for every segment of it.
    segments = zip(
        _with_queries(query, layout, added),
        _gather_keys(key, layout).split(layout.key_lengths, dim=2),
        _gather_keys(value, layout).split(layout.key_lengths, dim=2),
        layout.positions.split(layout.query_lengths),
        layout.key_positions.split(layout.key_lengths),
        strict=True,
    )
    # On a CPU the keys of grouped heads need no copies (transformers makes them), and one mask serves all layers.
    grouped = query.shape[1] != key.shape[1]
    on_cpu = attend is sdpa_attention_forward and query.device.type == "cpu" and masks is None
    on_cpu = on_cpu and not set(kwargs) & {"position_bias", "cache"}
    outputs = []
    for index, (own_query, own_key, own_value, positions, own_positions_k) in enumerate(segments):
        if (n := added[index]) is not None:
            row = attend(module, own_query, own_key, own_value, None, **kwargs)[0]
            outputs.append(row[:, n:] if n else row)
            continue
        for q, k in blocks(len(positions), len(own_positions_k), limits[index][0]):
            k = k if masks is None else slice(None)
            part = own_query[:, :, q], own_key[:, :, k], own_value[:, :, k]
            seen = positions[q], own_positions_k[k], *limits[index]
            if on_cpu:
                mask = _kept_mask(layout, (index, q.start, *limits[index], query.dtype), query, *seen)
                # transformers would copy the keys for every head of their group.
                given = {
                    "dropout_p": kwargs.get("dropout", 0.0),
                    "scale": kwargs.get("scaling"),
                    "enable_gqa": grouped,
                }
                attended = functional.scaled_dot_product_attention(*part, attn_mask=mask, **given)
                outputs.append(attended.transpose(1, 2))
                continue
            mask = visible(*seen) if masks is None else masks[index][:, :, q]
            if is_eager:  # eager functions add their mask
                mask = query.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min)
            outputs.append(attend(module, *part, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1)


def blocks(queries: int, keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of a segment's queries, and the keys that any of them sees; the last query stands at the last key."""
    for begin in range(0, queries, BLOCK):
        end = min(begin + BLOCK, queries)
        first, last = keys - queries + begin, keys - queries + end
        yield slice(begin, end), slice(0 if window is None else max(0, first - window + 1), last)


def _with_queries(query: torch.Tensor, layout: Layout, added: list[int | None]) -> tuple[torch.Tensor, ...]:
    """The queries of each segment behind zeros, cut from one tensor: the graph is to keep no other."""
    own = query.split(layout.query_lengths, dim=2)
    if not any(added):
        return own
    counts = [n or 0 for n in added]
    zeros = query.new_zeros(*query.shape[:2], max(counts), query.shape[3])
    led = torch.cat([x for n, part in zip(counts, own, strict=True) for x in (zeros[:, :, :n], part)], dim=2)
    return led.split([n + length for n, length in zip(counts, layout.query_lengths, strict=True)], dim=2)


def visible(positions: torch.Tensor, positions_k: torch.Tensor, window: int | None, chunk: int | None) -> torch.Tensor:
    """Which keys each query sees, `(1, 1, queries, keys)`."""
    position = positions[:, None]
    distance = position - positions_k[None]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if chunk is not None:
        mask = mask & (position // chunk == positions_k[None] // chunk)
    return mask[None, None]


_masks: WeakKeyDictionary[Layout, dict[Any, TensorWeakRef]] = WeakKeyDictionary()
"""Masks of the blocks of a layout for as long as some graph keeps them."""


def _kept_mask(layout: Layout, block: tuple, query: torch.Tensor, *seen: Any) -> torch.Tensor:
    """
    The mask of a block as torch's attention adds it: the tensor that another layer's graph keeps, if there is one.

    Of a mask of booleans every layer would keep a copy in the dtype of its scores. Where nothing is kept, without
    gradients and under gradient checkpointing, the mask goes with its layer.
    """
    known = _masks.setdefault(layout, {})
    mask = known[block]() if block in known else None
    if mask is None:
        sees = visible(*seen)
        mask = query.new_zeros(sees.shape).masked_fill_(~sees, -torch.inf)
        known[block] = TensorWeakRef(mask)
    return mask


def in_attention_dtype(*states: torch.Tensor) -> list[torch.Tensor]:
    """
    States in the precision that attention computes in: that of autocast where it is on, as torch's own attention does.

    Rotary embeddings are computed in float32 and leave query and key there, beside values in half precision.
    """
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(states)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.dtype == torch.float32 else x for x in states]


def _gather_keys(states: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The keys of all segments, one after another: `(1, K, T, D)` to `(1, K, sum of key_lengths, D)`."""
    if layout.key_index is None:
        return states
    order = layout.key_order if states.requires_grad else (None, None)
    # Token by token, as variable-length kernels read it. Squeezed: the gradient of `x[0]` is a copy of `x`.
    gathered = GatherKeys.apply(states.squeeze(0).transpose(0, 1), layout.key_index, *order)
    return gathered.transpose(0, 1).unsqueeze(0)


class GatherKeys(torch.autograd.Function):
    """
    The states `(T, K, D)` of the keys of all segments, `(sum of key_lengths, K, D)`.

    The backward that `index_select` would have adds the gradients of a shared token in whatever order the threads of a
    GPU come, and in half precision. This one is a single sum for each token, over the places that gathered it in
    their order, in float32: always the same sums, and one kernel whatever the number of segments.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, index: torch.Tensor, order: Any, offsets: Any) -> torch.Tensor:
        ctx.order, ctx.offsets = order, offsets
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return sum_by_token(grads[0], ctx.order, ctx.offsets), None, None, None


def sum_by_token(rows: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What stands at the places of `key_index`, `(n, K, D)`, summed for each token by its `key_order`: `(T, K, D)`."""
    flat = rows.reshape(rows.shape[0], -1)  # the kernel accumulates in float32, whatever it is given
    return functional.embedding_bag(order, flat, offsets, mode="sum").view(-1, *rows.shape[1:])
