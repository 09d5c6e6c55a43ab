"""
Attention over the segments of a layout, one segment at a time.

[`attend_by_segment`] calls a model's `sdpa` or `eager` function on one block of queries of one segment at a time. The
variable-length kernels of `attention.py` compute all segments in one call. Both take the keys of each segment from
[`gather_keys`], one copy for each segment that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from packaging.version import Version
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..layout.layout import Layout


__all__ = [
    "GatherKeys", "attend_by_segment", "by_token", "gather_keys", "gather_tokens", "in_attention_dtype",
    "query_blocks", "sum_by_token", "visible_keys",
]  # fmt: skip

QUERIES_PER_BLOCK = 1024
"""Queries of a masked block: a mask has at most `QUERIES_PER_BLOCK * keys` elements."""


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
    fixed_order: bool = False,
) -> torch.Tensor:
    """
    The model's `sdpa` or `eager` function on one block of one segment at a time.

    Args:
        attend (`Callable`):
            The attention function, `attend(module, query, key, value, mask, **kwargs)`.
        module (`torch.nn.Module`):
            The attention module, or a view of it.
        query (`torch.Tensor` of shape `(1, N, T, D)`):
            Queries of the packed row.
        key (`torch.Tensor` of shape `(1, K, sum of keys.lengths, D)`):
            Keys of the segments, from [`gather_keys`].
        value (`torch.Tensor` of shape `(1, K, sum of keys.lengths, D)`):
            Their values.
        layout ([`Layout`]):
            The segments.
        kwargs (`dict[str, Any]`):
            Further arguments of the module; `sliding_window` and `attention_chunk_size` limit the visible keys.
        is_eager (`bool`):
            Whether `attend` is an eager function, which adds its mask to the scores.
        masks (`list` of `torch.Tensor` of shape `(1, 1, queries, keys)`, *optional*):
            One prepared mask for each segment. They alone then decide which keys a query sees.
        fixed_order (`bool`, *optional*, defaults to `False`):
            On a CPU, give a token the same bits in each segment that it may be computed in.

    Returns:
        `torch.Tensor` of shape `(1, T, N, D)`.
    """
    # A window or chunk at least as long as a row hides nothing: the cheaper way without a mask stays open.
    windows, chunks = (
        [limit if limit is not None and limit < span else None for span in layout.spans]
        for limit in (kwargs.get("sliding_window"), kwargs.get("attention_chunk_size"))
    )
    # transformers' `sdpa` function copies keys and values for each query head of their group, and needs masks. On a
    # CPU torch's kernel is called instead. It takes no dropout, no values of another size than the keys, and no
    # arguments `position_bias` and `cache`.
    is_plain_sdpa = attend is sdpa_attention_forward and not set(kwargs) & {"position_bias", "cache"}
    has_kernel = query.device.type == "cpu" and query.shape[3] == value.shape[3] and not kwargs.get("dropout")
    # The name says CUDA: `sdpa_kernel` sets this flag for the kernels of all devices.
    uses_kernel = is_plain_sdpa and has_kernel and masks is None and torch.backends.cuda.flash_sdp_enabled()
    sizes = list(zip(layout.queries.lengths, layout.keys.lengths, windows, chunks, strict=True))
    if uses_kernel and fixed_order:
        places = layout.positions, layout.key_positions, sizes
        return CausalAttention.apply(query, key, value, *places, kwargs.get("scaling"))
    # `split` instead of slices: the gradient of each slice would be a tensor of the length of the whole packed row.
    segments = zip(
        sizes,
        query.split(layout.queries.lengths, dim=2),
        key.split(layout.keys.lengths, dim=2),
        value.split(layout.keys.lengths, dim=2),
        layout.positions.split(layout.queries.lengths),
        layout.key_positions.split(layout.keys.lengths),
        strict=True,
    )
    outputs = []
    for index, (size, segment_query, segment_key, segment_value, positions, positions_k) in enumerate(segments):
        # Without a mask `sdpa` is causal from the first key on, which is right for whole rows only.
        if masks is None and not is_eager and size[0] == size[1] and size[2:] == (None, None):
            outputs.append(attend(module, segment_query, segment_key, segment_value, None, **kwargs)[0])
            continue
        if uses_kernel:
            states = segment_query, segment_key, segment_value, positions, positions_k, [size]
            outputs.append(CausalAttention.apply(*states, kwargs.get("scaling")))
            continue
        for q, k in query_blocks(*size[:3]):
            k = k if masks is None else slice(None)  # a prepared mask may let queries see later keys
            states = segment_query[:, :, q], segment_key[:, :, k], segment_value[:, :, k]
            mask = visible_keys(positions[q], positions_k[k], *size[2:]) if masks is None else masks[index][:, :, q]
            if is_eager:  # eager functions add their mask
                mask = query.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min)
            outputs.append(attend(module, *states, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1)


def query_blocks(queries: int, keys: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """
    Blocks of a segment's queries, each with the range of keys that any of its queries sees.

    The last query is the last key (causal, aligned to the bottom right). Example: 4 queries, 6 keys and a window of 2
    are one block of the queries 0 to 3, with the keys 1 to 5.
    """
    for begin in range(0, queries, QUERIES_PER_BLOCK):
        end = min(begin + QUERIES_PER_BLOCK, queries)
        first, last = keys - queries + begin, keys - queries + end
        yield slice(begin, end), slice(0 if window is None else max(0, first - window + 1), last)


def visible_keys(
    positions: torch.Tensor, positions_k: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
    """Which keys each query sees, `(1, 1, queries, keys)`: causal, in the last `window` columns, in its chunk."""
    position = positions[:, None]
    distance = position - positions_k[None]
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if chunk is not None:
        mask = mask & (position // chunk == positions_k[None] // chunk)
    return mask[None, None]


class CausalAttention(torch.autograd.Function):
    """
    Causal attention of segments' queries `(1, N, T, D)` to keys `(1, K, sum of keys.lengths, D)`, on a CPU.

    The bits of a token depend on its query and its visible keys only, not on the segment that it is computed in. The
    order in which torch's kernel adds up keys depends on their number, and in small products on the number of queries.
    So a call has queries between two multiples of `QUERIES_OF_CALL` in their path, and the keys up to the second one:
    zeros where the segment ends before. Zeros also fill up the queries to a multiple of 16.

    Backward builds each mask again. It fills up nothing: gradients are sums over rows, without an order of their own.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor,
        positions_k: torch.Tensor, sizes: list[tuple], scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.places, ctx.scale = (positions, positions_k, sizes), scale
        calls = []
        for q, k, mask in _calls(query, *ctx.places):
            states = _for_kernel((query[:, :, q], key[:, :, k], value[:, :, k]), mask)
            results = _KERNEL(*states, is_causal=False, attn_mask=mask, scale=scale)
            calls.append([x[:, :, : q.stop - q.start].transpose(1, 2) for x in results])
        output, lse = (torch.cat(x, dim=1) for x in zip(*calls, strict=True))
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *of_tokens = ctx.saved_tensors
        grad, output, lse = (x.transpose(1, 2) for x in (grads[0], *of_tokens))
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value)]
        for q, k, mask in _calls(query, *ctx.places):
            mask = mask[:, :, : q.stop - q.start, : k.stop - k.start]
            states = *_for_kernel((query[:, :, q], key[:, :, k], value[:, :, k]), mask), output[:, :, q], lse[:, :, q]
            parts = _KERNEL_BACKWARD(grad[:, :, q], *states, 0.0, False, attn_mask=mask, scale=ctx.scale)
            for total, part, place in zip(sums, parts, (q, k, k), strict=True):
                heads = total.shape[1]
                total[:, :, place] += part if part.shape[1] == heads else part.unflatten(1, (heads, -1)).sum(2)
        return *(x.to(query.dtype) for x in sums), *[None] * 4


HAS_GROUPED_HEADS = Version(torch.__version__).release >= (2, 13)
"""Whether the kernel takes fewer heads of keys than of queries. Earlier versions are not known to."""

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

QUERIES_OF_CALL = 128
"""Most queries of a call of the kernel. It computes the keys up to the last of these places for each query."""


def _for_kernel(states: tuple[torch.Tensor, ...], mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """Query, key and value, filled with zeros to the size of the mask, with heads for a kernel without groups."""
    for x, length in zip(states, (mask.shape[2], *[mask.shape[3]] * 2), strict=True):
        missing, copies = length - x.shape[2], 1 if HAS_GROUPED_HEADS else states[0].shape[1] // x.shape[1]
        filled = functional.pad(x, (0, 0, 0, missing)) if missing else x
        yield filled if copies == 1 else filled.repeat_interleave(copies, dim=1)


def _calls(
    query: torch.Tensor, positions: torch.Tensor, positions_k: torch.Tensor, sizes: list[tuple]
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Queries, keys and mask (0 or -inf) of each call of the kernel. The mask has the size of the filled call."""
    longest = max(keys for _, keys, *_ in sizes)
    # Masks without a window or chunk are parts of this one, in which query `i` sees the keys up to `longest + i`.
    causal = query.new_full((1, 1, QUERIES_OF_CALL, longest + QUERIES_OF_CALL), -torch.inf).triu_(longest + 1)
    q = k = 0  # where the path of the segment begins
    for queries, keys, window, chunk in sizes:
        q -= keys - queries
        for place in range((keys - queries) // QUERIES_OF_CALL * QUERIES_OF_CALL, keys, QUERIES_OF_CALL):
            begin, end = max(place, keys - queries), min(place + QUERIES_OF_CALL, keys)
            first = 0 if window is None else max(0, place - window + 1)
            of_queries, of_keys = slice(q + begin, q + end), slice(k + first, k + end)
            n, diagonal = end - begin, longest - begin
            mask = causal[:, :, : n + -n % 16, diagonal + first : diagonal + place + QUERIES_OF_CALL]
            if window is not None or chunk is not None:
                is_visible = visible_keys(positions[of_queries], positions_k[of_keys], window, chunk)
                mask = mask.clone()
                mask[:, :, :n, : end - first].masked_fill_(~is_visible, -torch.inf)
            yield of_queries, of_keys, mask
        q, k = q + keys, k + keys


def in_attention_dtype(*states: torch.Tensor) -> list[torch.Tensor]:
    """
    States in the precision of attention: under autocast that of autocast, as in torch's own attention.

    Rotary embeddings compute in float32 and return query and key in float32, while values are in half precision.
    """
    device = states[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(states)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.dtype == torch.float32 else x for x in states]


def gather_keys(layout: Layout, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of all segments, concatenated: each `(1, K, T, D)` to `(1, K, sum of keys.lengths, D)`."""
    if layout.key_index is None:
        return key, value
    key, value = gather_tokens(layout, key, value)
    return key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)


def gather_tokens(layout: Layout, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[`gather_keys`] with tokens first in the result: each `(1, K, T, D)` to `(sum of keys.lengths, K, D)`."""
    if (index := layout.key_index) is None:
        return by_token(key), by_token(value)
    if not (key.requires_grad or value.requires_grad):  # a function with a backward costs time on the host
        return by_token(key).index_select(0, index), by_token(value).index_select(0, index)
    return GatherKeys.apply(key, value, index, *layout.key_sort_order)


def by_token(states: torch.Tensor) -> torch.Tensor:
    """States `(1, N, T, D)` as `(T, N, D)`, the memory layout that variable-length kernels read."""
    # `squeeze(0)` instead of `[0]`: its gradient is a view, that of an index a copy of all states.
    return states.squeeze(0).transpose(0, 1)


class GatherKeys(torch.autograd.Function):
    """
    Keys and values of all segments: each `(1, K, T, D)` to `(sum of keys.lengths, K, D)`.

    The backward of `index_select` adds the gradients of a shared token in the order in which GPU threads arrive, and
    in half precision. This one is a single sum for each token, in float32 and in a fixed order: the same result in
    every run, and one kernel for any number of segments.
    """

    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, index: torch.Tensor, order: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.order, ctx.offsets = order, offsets
        return by_token(key).index_select(0, index), by_token(value).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums = (sum_by_token(x, ctx.order, ctx.offsets) for x in grads)
        return *(x.transpose(0, 1).unsqueeze(0) for x in sums), None, None, None


def sum_by_token(rows: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """
    Sum the values of the gathered keys, `(n, K, D)`, for each token, `(T, K, D)`.

    `order` are the places of `key_index` sorted by token, `offsets` where each token begins in `order`.
    """
    flat = rows.reshape(rows.shape[0], -1)
    # The bag of a token holds its places. `embedding_bag` accumulates in float32, whatever the dtype of its inputs.
    return functional.embedding_bag(order, flat, offsets, mode="sum").view(-1, *rows.shape[1:])
