"""
Packed attention as an operator of torch, for compiled layers on devices without a variable-length kernel (CPU).

A compiler cannot trace a loop over segments whose lengths change with every batch. As an operator, attention over the
segments is one node of its graph, and the backward another. Importing this module registers both with torch; it is
imported when the first layers are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional

from .segments import query_blocks, visible_keys


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
    Causal attention over segments, aligned to the bottom right: the last query of a segment sees its last key.

    Args:
        query (`torch.Tensor` of shape `(T, N, D)`):
            Queries of all segments.
        key (`torch.Tensor` of shape `(keys, K, D)`):
            Keys of all segments, gathered.
        value (`torch.Tensor` of shape `(keys, K, D)`):
            Values of all segments, gathered.
        cu_seqlens_q (`torch.Tensor` of shape `(S + 1,)`):
            Where the queries of the segments begin and end.
        cu_seqlens_k (`torch.Tensor` of shape `(S + 1,)`):
            Where their keys begin and end.
        scale (`float`):
            Factor of the scores.
        window (`int`):
            Maximum number of keys that a query sees, its own included; -1 for all.

    Returns:
        `torch.Tensor` of shape `(T, N, D)`.
    """
    # Contiguous, as the fake function below promises: by default `empty_like` keeps the strides of the query.
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    is_grouped = query.shape[1] != key.shape[1]
    for q, k, mask in _blocks(cu_seqlens_q, cu_seqlens_k, window):
        states = (x.transpose(0, 1).unsqueeze(0) for x in (query[q], key[k], value[k]))
        attended = functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
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
    """Gradients of query, key and value. The weights are recomputed, in float32 or higher precision."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    d_query, d_key, d_value = (x.new_zeros(x.shape, dtype=dtype) for x in (query, key, value))
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    for q, k, mask in _blocks(cu_seqlens_q, cu_seqlens_k, window):
        # `(K, group, queries, D)` against `(K, 1, keys, D)`: broadcast over the group, without copies of the keys.
        queries, d_output = (
            x[q].to(dtype).unflatten(1, (heads, group)).permute(1, 2, 0, 3) for x in (query, upstream)
        )
        keys, values = (x[k].to(dtype).transpose(0, 1).unsqueeze(1) for x in (key, value))
        weights = (queries @ keys.mT * scale).masked_fill_(~mask, -torch.inf).softmax(-1)
        d_weights = d_output @ values.mT
        # Backward of softmax: dS = P * (dP - rowsum(P * dP)), times the scale of the scores.
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
        d_query[q] = (d_scores @ keys).permute(2, 0, 1, 3).flatten(1, 2)
        # `+=`, because blocks of one segment share keys; summed over the group of query heads (dimension 1).
        d_key[k] += (d_scores.mT @ queries).sum(1).transpose(0, 1)
        d_value[k] += (weights.mT @ d_output).sum(1).transpose(0, 1)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype)


@attend_segments_backward.register_fake
def _(
    upstream: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    # The inputs only: the output would cost memory, and the backward recomputes the weights anyway.
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    gradients = attend_segments_backward(upstream, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *gradients, None, None, None, None  # none of cu_seqlens, scale and window


attend_segments.register_autograd(_backward, setup_context=_save_for_backward)


def _blocks(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, window: int
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Blocks of queries, each within one segment, with the range of keys that they see and the mask between them."""
    limit = None if window < 0 else window
    for (q, end_q), (k, end_k) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        key_places = torch.arange(end_k - k, device=cu_seqlens_k.device)
        query_places = key_places[end_k - k - (end_q - q) :]  # the queries are the last keys
        for block, keys in query_blocks(end_q - q, end_k - k, limit):
            mask = visible_keys(query_places[block], key_places[keys], limit, None)
            yield slice(q + block.start, q + block.stop), slice(k + keys.start, k + keys.stop), mask
