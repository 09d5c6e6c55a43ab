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
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.weak import TensorWeakRef
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from .compat import flash_arguments
from .errors import PaddingRemovalError
from .layout import Layout


__all__ = [
    "BLOCK",
    "attend_by_segment",
    "attend_torch_varlen",
    "attend_varlen",
    "in_attention_dtype",
    "sum_by_token",
    "torch_varlen_applies",
    "torch_varlen_is_complete",
    "torch_varlen_obstacle",
]

logger = logging.get_logger(__name__)

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
            max_length_q=layout.longest[0],
            max_length_k=layout.longest[1],
            **flash_arguments(layout),
            **kwargs,
        )
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        computed_in = in_attention_dtype(query)[0].dtype  # transformers casts for FlashAttention under autocast
        half = query.device.type != "cpu" and computed_in in (torch.float16, torch.bfloat16)
        if half or isinstance(error, torch.OutOfMemoryError):
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
    masks: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """
    The model's `sdpa` or `eager` function on one block of one segment at a time.

    With `masks`, one `(1, 1, queries, keys)` for each segment, these say what is seen, and nothing else.
    """
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
    # On a CPU the keys of grouped heads need no copies, and one mask serves all layers of a forward.
    on_cpu = attend is sdpa_attention_forward and query.device.type == "cpu"
    on_cpu = on_cpu and not set(kwargs) & {"position_bias", "cache"}
    outputs = []
    given = iter(masks or ())
    for index, (own_query, own_key, own_value, own_positions, own_positions_k, span) in enumerate(segments):
        queries, keys = len(own_positions), len(own_positions_k)
        windowed = window if window is not None and window < span else None
        chunked = chunk if chunk is not None and chunk < span else None
        # Without a mask `sdpa` is causal and attends from the first key on: right for a whole row only. Where less is
        # shared than not, a row made whole by queries that nobody asks for is quicker than a mask.
        shared, own_mask = keys - queries, next(given, None)
        whole = not is_eager and masks is None and shared <= queries and windowed is None and chunked is None
        if whole and shared:
            row = torch.cat([own_query.new_zeros(*own_query.shape[:2], shared, own_query.shape[3]), own_query], dim=2)
            outputs.append(attend(module, row, own_key, own_value, None, **kwargs)[0][:, shared:])
            continue
        block = queries if whole else BLOCK
        for begin in range(0, queries, block):
            end = min(begin + block, queries)
            last_k = keys - queries + end if masks is None else keys
            k = slice(max(0, last_k - (end - begin) - windowed + 1) if windowed else 0, last_k)
            part = own_query[:, :, begin:end], own_key[:, :, k], own_value[:, :, k]
            seen = own_positions[begin:end], own_positions_k[k], windowed, chunked
            if whole:
                outputs.append(attend(module, *part, None, **kwargs)[0])
            elif on_cpu and own_mask is None:
                mask = _kept_mask(layout, (index, begin, windowed, chunked, query.dtype), query, *seen)
                outputs.append(_attend_grouped(*part, mask, kwargs))
            else:
                mask = _visible(*seen) if own_mask is None else own_mask[:, :, begin:end]
                if is_eager:  # eager functions add their mask
                    mask = query.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(query.dtype).min)
                outputs.append(attend(module, *part, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1)


def _visible(
    positions: torch.Tensor, positions_k: torch.Tensor, window: int | None, chunk: int | None
) -> torch.Tensor:
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
        visible = _visible(*seen)
        mask = query.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        known[block] = TensorWeakRef(mask)
    return mask


def _attend_grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """torch's attention under a mask; transformers would copy the keys for every head of their group."""
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)


def attend_torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """torch's own variable-length FlashAttention, which takes `(T, heads, D)` and any grouping of heads."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    window, grouped = kwargs.get("sliding_window"), query.shape[1] != key.shape[1]
    # Squeezed, not indexed: the gradient of `x[0]` is a copy of `x`.
    output = varlen_attn(
        query.squeeze(0).transpose(0, 1),
        _gather_keys(key, layout).squeeze(0).transpose(0, 1),
        _gather_keys(value, layout).squeeze(0).transpose(0, 1),
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        *layout.longest,
        scale=kwargs.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": grouped} if "enable_gqa" in _varlen_parameters() else {}),  # torch 2.11 groups by itself
    )
    return output.unsqueeze(0)


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


def torch_varlen_obstacle(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict) -> str | None:
    """
    Why attention in half precision on a CUDA GPU cannot be torch's variable-length kernel.

    Returns:
        `str`, *optional*: the reason and the remedy, as far as there is one; `None` if it can.
    """
    size, window = query.shape[-1], kwargs.get("sliding_window")
    flash = "load the model with `attn_implementation='flash_attention_2'`"
    if value.shape[-1] != size:
        return f"queries have {size} dimensions and values {value.shape[-1]}, and it takes equal ones"
    if size > 256 or size % 8:
        return f"its heads have at most 256 dimensions, in multiples of 8, and this model's have {size}"
    if kwargs.get("dropout"):
        return f"it has no dropout, and this model drops {kwargs['dropout']} of its weights; set `attention_dropout=0`"
    if kwargs.get("softcap") is not None:
        return f"it has no softcap; {flash}, which has"
    if kwargs.get("s_aux") is not None:
        return "it has no attention sinks; load the model with a flash-attention kernel that has (FA3 from the Hub)"
    if kwargs.get("attention_chunk_size") is not None:
        return "it cannot keep chunks apart"
    # Its window counts tokens, that of a padded mask columns: the same where rows have no holes.
    if window is not None and layout.spans != layout.key_lengths:
        return f"its window counts tokens, and rows with masked tokens within need one of {window} columns"
    if not torch_varlen_is_complete():
        return f"this torch ({torch.__version__}) or GPU does not have it; use torch 2.11 or later on Ampere or newer"
    return None


def torch_varlen_applies(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]) -> bool:
    """
    Whether attention is torch's variable-length kernel.

    In half precision on CUDA that is what a run expects; where it cannot be, a warning says so once, with the reason.
    """
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    reason = torch_varlen_obstacle(query, value, layout, kwargs)
    if reason is not None:
        logger.warning_once(
            "Packed batches attend segment by segment, which is exact and slow: torch's variable-length "
            f"FlashAttention cannot serve this model, because {reason}."
        )
    return reason is None


@cache
def torch_varlen_is_complete() -> bool:
    """Whether this torch has variable-length attention with windows, scale and grouped heads, and the GPU runs it."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return False  # it is FlashAttention, which starts with Ampere
    return {"scale", "window_size"} <= _varlen_parameters()


@cache
def _varlen_parameters() -> frozenset[str]:
    """
    What torch's variable-length attention takes: nothing where there is none.

    torch 2.9 has none, 2.10 has neither scale nor window, 2.11 groups heads without being asked.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _gather_keys(states: torch.Tensor, layout: Layout) -> torch.Tensor:
    return states if layout.key_index is None else _GatherKeys.apply(states, layout)


class _GatherKeys(torch.autograd.Function):
    """
    The keys of all segments, one after another: `(1, K, T, D)` to `(1, K, sum of key_lengths, D)`.

    The backward that `index_select` would have adds the gradients of a shared token in whatever order the threads of a
    GPU come, and in half precision. This one is a single sum for each token, over the places that gathered it in
    their order, in float32: always the same sums, and one kernel whatever the number of segments.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, layout: Layout) -> torch.Tensor:
        ctx.layout = layout
        index: Any = layout.key_index
        # Token by token, as variable-length kernels read it; `(1, K, n, D)` is a view of that.
        return states[0].transpose(0, 1).index_select(0, index).transpose(0, 1).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_by_token(grads[0][0].transpose(0, 1), ctx.layout).transpose(0, 1).unsqueeze(0), None


def sum_by_token(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What stands at the places of `key_index`, `(n, K, D)`, summed for each packed token: `(T, K, D)`."""
    order: Any = layout.key_order
    flat = rows.reshape(rows.shape[0], -1)  # the kernel accumulates in float32, whatever it is given
    return functional.embedding_bag(order, flat, layout.key_offsets, mode="sum").view(-1, *rows.shape[1:])
