"""
Attention over the segments of a layout, one function for each way to compute it.

[`attend_varlen`] calls a FlashAttention function once for all segments, [`attend_torch_varlen`] torch's own, and
[`attend_by_segment`] a model's `sdpa` or `eager` function on one block of one segment at a time. All of them gather
the keys of the segments first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from .compat import flash_arguments
from .errors import PaddingRemovalError
from .layout import Layout


__all__ = [
    "BLOCK",
    "attend_by_segment",
    "attend_torch_varlen",
    "attend_varlen",
    "torch_varlen_applies",
    "torch_varlen_is_complete",
]

BLOCK = 1024
"""Queries per masked block: bounds the mask of a segment at `BLOCK x keys`."""


def attend_varlen(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """One call of a FlashAttention function of transformers."""
    try:
        output, _ = attend(
            module,
            query,
            _gather_keys(key, layout),
            _gather_keys(value, layout),
            None,
            cu_seq_lens_q=layout.cu_seqlens_q,
            cu_seq_lens_k=layout.cu_seqlens_k,
            max_length_q=max(layout.query_lengths),
            max_length_k=max(layout.key_lengths),
            **flash_arguments(layout),
            **kwargs,
        )
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if query.device.type != "cpu" and query.dtype in (torch.float16, torch.bfloat16):
            raise
        raise PaddingRemovalError(
            f"FlashAttention failed with {query.dtype} on {query.device.type}: {error} It runs on GPUs in float16 or "
            "bfloat16 only. Load the model with `dtype='bfloat16'` (or train with `bf16=True`), or use "
            "`attn_implementation='sdpa'`."
        ) from error
    return output


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
) -> torch.Tensor:
    """The model's `sdpa` or `eager` function on one block of one segment at a time."""
    window: int | None = kwargs.get("sliding_window")
    chunk: int | None = kwargs.get("attention_chunk_size")
    positions_k = layout.positions if layout.key_index is None else layout.positions.index_select(0, layout.key_index)
    # Split rather than sliced: the gradient of a slice is as long as the whole row, for every segment of it.
    segments = zip(
        query.split(layout.query_lengths, dim=2),
        _gather_keys(key, layout).split(layout.key_lengths, dim=2),
        _gather_keys(value, layout).split(layout.key_lengths, dim=2),
        layout.positions.split(layout.query_lengths),
        positions_k.split(layout.key_lengths),
        layout.spans,
        strict=True,
    )
    outputs = []
    for own_query, own_key, own_value, own_positions, own_positions_k, span in segments:
        queries, keys = len(own_positions), len(own_positions_k)
        windowed = window if window is not None and window < span else None
        chunked = chunk if chunk is not None and chunk < span else None
        # Without a mask `sdpa` is causal and attends from the first key on: right for a whole row only.
        whole = not is_eager and queries == keys and windowed is None and chunked is None
        block = queries if whole else BLOCK
        for begin in range(0, queries, block):
            end = min(begin + block, queries)
            last_k = keys - queries + end
            k = slice(max(0, last_k - (end - begin) - windowed + 1) if windowed else 0, last_k)
            mask = None
            if not whole:
                position = own_positions[begin:end, None]
                distance = position - own_positions_k[None, k]
                mask = (distance >= 0)[None, None]
                if windowed is not None:
                    mask = mask & (distance < windowed)
                if chunked is not None:
                    mask = mask & (position // chunked == own_positions_k[None, k] // chunked)
                if is_eager:  # eager functions add their mask
                    mask = query.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min)
            part = own_query[:, :, begin:end], own_key[:, :, k], own_value[:, :, k]
            outputs.append(attend(module, *part, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1)


def attend_torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """torch's own variable-length FlashAttention, which takes `(T, heads, D)` and any grouping of heads."""
    from torch.nn.attention.varlen import varlen_attn

    window = kwargs.get("sliding_window")
    output: Any = varlen_attn(
        query[0].transpose(0, 1),
        _gather_keys(key, layout)[0].transpose(0, 1),
        _gather_keys(value, layout)[0].transpose(0, 1),
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        max(layout.query_lengths),
        max(layout.key_lengths),
        scale=kwargs.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0)


def torch_varlen_applies(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]) -> bool:
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and value.shape[-1] == query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and not kwargs.get("dropout")
        and kwargs.get("softcap") is None
        and kwargs.get("s_aux") is None
        and kwargs.get("attention_chunk_size") is None
        # Its window counts tokens, that of a padded mask columns: the same where rows have no holes.
        and (kwargs.get("sliding_window") is None or layout.spans == layout.key_lengths)
        and torch_varlen_is_complete()
    )


@cache
def torch_varlen_is_complete() -> bool:
    """Whether this torch has variable-length attention with windows, scale and grouped heads, and the GPU runs it."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return False  # it is FlashAttention, which starts with Ampere
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _gather_keys(states: torch.Tensor, layout: Layout) -> torch.Tensor:
    return states if layout.key_index is None else _GatherKeys.apply(states, layout)


class _GatherKeys(torch.autograd.Function):
    """
    The keys of all segments, one after another: `(1, K, T, D)` to `(1, K, sum of key_lengths, D)`.

    The backward that `index_select` would have adds the gradients of a shared token in whatever order the threads of a
    GPU come. This one adds what a segment shares to the segment before it, from the last to the first, and each ends
    up with the gradients of its own tokens: always the same sums, and no scattered writes.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout, index = layout, layout.key_index
        return states if index is None else states.index_select(2, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout: Layout = ctx.layout
        key_index: Any = layout.key_index
        segments, indices = grads[0].split(layout.key_lengths, dim=2), key_index.split(layout.key_lengths)
        shared = [k - q for k, q in zip(layout.key_lengths, layout.query_lengths, strict=True)]
        states = torch.cat([segment[:, :, n:] for segment, n in zip(segments, shared, strict=True)], dim=2)
        for segment, index, n in zip(segments, indices, shared, strict=True):
            if n:
                states.index_add_(2, index[:n], segment[:, :, :n])
        return states, None
