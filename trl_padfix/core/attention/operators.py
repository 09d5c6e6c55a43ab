"""
The operator of packed attention for compiled layers, with the shapes of what it returns.

A compiler cannot look into a loop over segments whose lengths change with every batch. To it attention segment by
segment, where torch has no variable-length kernel for it (CPU), is one node, and its backward another. Imported when
the first layers are compiled, which registers them with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional

from .segments import blocks, visible


__all__ = ["attend_segments"]


@torch.library.custom_op("trl_padfix::attend_segments", mutates_args=())
def attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """
    Causal attention over segments, aligned to the bottom right: `(T, N, D)` of queries `(T, N, D)`, keys and values
    `(keys, K, D)`. A query sees `window` keys at most, its own counted; -1 for all.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    grouped = query.shape[1] != key.shape[1]
    for q, k, mask in _blocks(cu_seqlens_q, cu_seqlens_k, window):
        states = (x.transpose(0, 1).unsqueeze(0) for x in (query[q], key[k], value[k]))
        attended = functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=grouped)
        output[q] = attended.squeeze(0).transpose(0, 1)
    return output


@attend_segments.register_fake
def _(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("trl_padfix::attend_segments_backward", mutates_args=())
def attend_segments_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; the weights are computed again, in float32 at least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    of_query, of_key, of_value = (x.new_zeros(x.shape, dtype=dtype) for x in (query, key, value))
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    for q, k, mask in _blocks(cu_seqlens_q, cu_seqlens_k, window):
        # `(K, group, queries, D)` against `(K, 1, keys, D)`: a head of keys serves its group without a copy.
        queries, given = (x[q].to(dtype).unflatten(1, (heads, group)).permute(1, 2, 0, 3) for x in (query, upstream))
        keys, values = (x[k].to(dtype).transpose(0, 1).unsqueeze(1) for x in (key, value))
        weights = (queries @ keys.mT * scale).masked_fill_(~mask, -torch.inf).softmax(-1)
        of_weights = given @ values.mT
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
        of_query[q] = (of_scores @ keys).permute(2, 0, 1, 3).flatten(1, 2)
        of_key[k] += (of_scores.mT @ queries).sum(1).transpose(0, 1)
        of_value[k] += (weights.mT @ given).sum(1).transpose(0, 1)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


@attend_segments_backward.register_fake
def _(
    upstream: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_states(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _attend_back(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    return (*attend_segments_backward(upstream, *ctx.saved_tensors, ctx.scale, ctx.window), *(None,) * 4)


attend_segments.register_autograd(_attend_back, setup_context=_keep_states)


def _blocks(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, window: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Blocks of queries of one segment each, the keys that any of them sees, and which sees which."""
    limit = None if window < 0 else window
    for (q, end_q), (k, end_k) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        places = torch.arange(end_k - k, device=cu_seqlens_k.device)
        own_places = places[end_k - k - (end_q - q) :]
        for own, keys in blocks(end_q - q, end_k - k, limit):
            mask = visible(own_places[own], places[keys], limit, None)
            yield slice(q + own.start, q + own.stop), slice(k + keys.start, k + keys.stop), mask
