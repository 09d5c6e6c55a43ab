"""Variable-length attention kernels (`cu_seqlens`) of flash-attn, the Hub and torch: all segments in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from ..model.inspection import package_of, parameters_of
from ..model.older import flash_arguments
from .segments import in_attention_dtype


__all__ = ["attend_torch_varlen", "attend_varlen", "torch_varlen", "torch_varlen_applies", "torch_varlen_is_complete"]


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
    One call of a function that takes segments, such as FlashAttention: `(1, N, T, D)` to `(1, T, N, D)`.

    Raises:
        PaddingRemovalError: If the kernel does not support an argument of the module, or this precision or device.
    """
    if _is_triton_backend():
        # flash-attn 2.8.3's ignores these arguments without an error.
        for name, alternative in {"softcap": "eager", "sliding_window": "sdpa"}.items():
            if kwargs.get(name) is not None:
                raise PaddingRemovalError(
                    f"flash-attn's Triton backend ignores windows and softcaps, and {type(module).__name__} needs "
                    f"`{name}={kwargs[name]}`. Load the model with `attn_implementation={alternative!r}`."
                )
        query, key, value = map(_tokens_first, (query, key, value))
    try:
        output, _ = attend(
            module,
            query,
            key,
            value,
            None,
            cu_seq_lens_q=layout.queries.cu_seqlens,
            cu_seq_lens_k=layout.keys.cu_seqlens,
            max_length_q=layout.queries.longest,
            max_length_k=layout.keys.longest,
            **flash_arguments(layout),
            **kwargs,
        )
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        dtype = in_attention_dtype(query)[0].dtype  # transformers casts for FlashAttention under autocast
        is_half_on_gpu = query.device.type != "cpu" and dtype in (torch.float16, torch.bfloat16)
        is_own = package_of(attend) != "transformers"
        if is_half_on_gpu or is_own or isinstance(error, torch.OutOfMemoryError):
            raise  # not a matter of precision or device
        raise PaddingRemovalError(
            f"FlashAttention failed with {query.dtype} on {query.device.type}: {error} It runs on GPUs in float16 or "
            "bfloat16 only. Load the model with `dtype='bfloat16'` (or train with `bf16=True`), or use "
            "`attn_implementation='sdpa'`."
        ) from error
    return output


def _tokens_first(states: torch.Tensor) -> torch.Tensor:
    """States `(1, N, T, D)` with tokens first in memory."""
    # Partial rotary embeddings return states with heads first. For such strides flash-attn's Triton backend (2.8.3)
    # computes wrong gradients.
    by_token = states.transpose(1, 2)
    return states if by_token.is_contiguous() else by_token.contiguous().transpose(1, 2)


def _is_triton_backend() -> bool:
    """Whether flash-attn runs on its Triton backend for AMD GPUs (2.8.3), which ignores some arguments."""
    interface = sys.modules.get("flash_attn.flash_attn_interface")
    backend = getattr(interface, "flash_attn_gpu", None)
    return backend is not None and backend.__name__.endswith(".interface_fa")


def attend_torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """torch's own variable-length FlashAttention over a layout: `(T, N, D)` to `(1, T, N, D)`."""
    segments = layout.queries.cu_seqlens, layout.keys.cu_seqlens, layout.queries.longest, layout.keys.longest
    return torch_varlen(query, key, value, segments, kwargs.get("scaling"), kwargs.get("sliding_window")).unsqueeze(0)


def torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[torch.Tensor, torch.Tensor, int, int],
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """
    torch's variable-length FlashAttention on `(T, heads, D)`, with grouped heads or without.

    `segments` are `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q` and `max_seqlen_k`. A query sees `window` keys at
    most, its own included; `None` for all.
    """
    # `torch.nn.attention.varlen.varlen_attn` calls this operator from one in Python: three times as long on the host.
    # `window` counts the token itself, the left window does not; 0 to the right is causal.
    is_causal, left = window is None, -1 if window is None else window - 1
    attend = torch.ops.aten._flash_attention_forward
    return attend(
        query, key, value, *segments, 0.0, is_causal, False, scale=scale, window_size_left=left, window_size_right=0
    )[0]


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
        return f"it has no softcap; {flash}, which has one"
    if kwargs.get("s_aux") is not None:
        return (
            "it has no attention sinks; load the model with a flash-attention kernel that has them (FA3 from the Hub)"
        )
    if kwargs.get("attention_chunk_size") is not None:
        return "it cannot keep chunks apart"
    # The kernel's window counts tokens, that of a padded mask columns: equal unless tokens within a row are masked.
    if window is not None and layout.spans != layout.keys.lengths:
        return f"its window counts tokens, and rows with masked tokens within need a window of {window} columns"
    if not torch_varlen_is_complete():
        return f"this torch ({torch.__version__}) or GPU does not have it; use torch 2.11 or later on Ampere or newer"
    return None


def torch_varlen_applies(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]) -> bool:
    """
    Whether torch's variable-length kernel computes this attention.

    In half precision on CUDA it should. If it cannot, a warning gives the reason, once.
    """
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    reason = torch_varlen_obstacle(query, value, layout, kwargs)
    if reason is not None:
        logger.warning_once(
            "Packed batches attend segment by segment, which is exact and slow: torch's variable-length "
            f"FlashAttention cannot run this model, because {reason}."
        )
    return reason is None


@cache
def torch_varlen_is_complete() -> bool:
    """
    Whether this torch has variable-length attention with windows, scale and grouped heads, and the GPU runs it.

    torch 2.9 has none, and 2.10 has neither scale nor window.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return False  # FlashAttention needs Ampere or newer
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size"} <= parameters_of(varlen_attn).keys()
