"""Variable-length attention kernels of flash-attn, the Hub and torch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from ..model.older import flash_arguments
from .segments import _gather_keys, in_attention_dtype


__all__ = [
    "attend_torch_varlen",
    "attend_varlen",
    "torch_varlen",
    "torch_varlen_applies",
    "torch_varlen_is_complete",
    "torch_varlen_obstacle",
]


logger = logging.get_logger(__name__)


def attend_varlen(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """
    One call of a FlashAttention function of transformers.

    Raises:
        PaddingRemovalError: If the kernel cannot compute what the module asks for, in this precision or at all.
    """
    for name, other in {"softcap": "eager", "sliding_window": "sdpa"}.items():
        if kwargs.get(name) is not None and _is_triton_backend():
            raise PaddingRemovalError(
                f"flash-attn's Triton backend ignores windows and softcaps, and {type(module).__name__} asks for "
                f"`{name}={kwargs[name]}`. Load the model with `attn_implementation={other!r}`."
            )
    # Partial rotary embeddings leave states head by head; flash-attn's Triton backend (2.8.3) takes them as they lie,
    # and gets their gradients wrong.
    states = query, _gather_keys(key, layout), _gather_keys(value, layout)
    try:
        output, _ = attend(
            module,
            *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in states),
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


def _is_triton_backend() -> bool:
    """Whether flash-attn runs on its Triton backend for AMD GPUs (2.8.3), which does nothing with some arguments."""
    interface = sys.modules.get("flash_attn.flash_attn_interface")
    return getattr(getattr(interface, "flash_attn_gpu", None), "__name__", "").endswith(".interface_fa")


def attend_torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """torch's own variable-length FlashAttention over a layout."""
    # Squeezed, not indexed: the gradient of `x[0]` is a copy of `x`.
    states = (query, _gather_keys(key, layout), _gather_keys(value, layout))
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in states)
    bounds = layout.cu_seqlens_q, layout.cu_seqlens_k, *layout.longest
    return torch_varlen(query, key, value, bounds, kwargs.get("scaling"), kwargs.get("sliding_window")).unsqueeze(0)


def torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: tuple, scale: float | None, window: int | None
) -> torch.Tensor:
    """
    torch's variable-length FlashAttention on `(T, heads, D)` with any grouping of heads.

    `bounds` are `cu_seqlens` of queries and keys, then the longest of each; a query sees `window` keys at most, its
    own counted.
    """
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    # torch 2.11 groups heads by itself.
    grouped: dict[str, bool] = {"enable_gqa": query.shape[1] != key.shape[1]} if _takes_gqa() else {}
    size = (-1 if window is None else window - 1, 0)
    return varlen_attn(query, key, value, *bounds, scale=scale, window_size=size, **grouped)


@torch.compiler.assume_constant_result
def _takes_gqa() -> bool:
    return "enable_gqa" in _varlen_parameters()


def torch_varlen_obstacle(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict) -> str | None:
    """Why attention in half precision on a CUDA GPU cannot be torch's variable-length kernel; `None` if it can."""
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
