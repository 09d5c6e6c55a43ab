"""
Attention over a layout, with the model's own attention functions.

Inside a packed forward the attention modules of a decoder look up one more implementation, [`packed_attention`]. It
computes each segment of the layout with the function that the model is configured for, so scaling, softcap, sinks and
grouped heads are the model's own:

- FlashAttention (`flash_attention_2/3/4`, Hub kernels): one variable-length call, `cu_seqlens` from the layout, keys
  gathered per segment;
- `sdpa`: torch's variable-length FlashAttention on CUDA in half precision, without any package to install; else
  scaled-dot-product attention, segment by segment;
- `eager`: the model's eager function, segment by segment.

No mask is larger than one block of one segment.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .compat import flash_arguments
from .layout import Layout
from .masks import PackedMask, describing_masks


__all__ = ["PaddingRemovalError", "packed_attention"]

PACKED = "trl_padfix"
"""Name of [`packed_attention`] among transformers' attention implementations, registered while it is needed."""

LAYOUT = "padding_layout"
"""Keyword under which a [`PackedCall`] travels from the decoder through its layers to the attention function."""

BLOCK = 1024
"""Queries per masked block: bounds the mask of a segment at `BLOCK x keys`."""

# Per-token or per-model arguments that the attention functions receive and that the layout already accounts for.
_IGNORED = {"position_ids", "cache_position", "position_embeddings", "use_cache", "is_causal", "output_attentions"} | {
    "num_items_in_batch",  # the loss's, which older models hand down to their layers
    "mm_token_type_ids",  # up to transformers 5.0 what tells images from text goes down to every layer
}
_UNDERSTOOD = _IGNORED | {"s_aux", "softcap", "dropout", "scaling", "sliding_window"}


class PaddingRemovalError(NotImplementedError):
    """Padding cannot be removed here with exact results; the message names what, why and what to do."""


@dataclass(frozen=True, eq=False)
class PackedCall:
    """
    What the attention of one packed forward needs to know: the layout and the implementation to compute with.

    It lives as long as the forward can still be recomputed: gradient checkpointing keeps it until backward is done.
    """

    layout: Layout
    implementation: str


@contextmanager
def attending_with(config: PretrainedConfig, implementation: str) -> Iterator[None]:
    """Let the modules that share `config` look up `implementation`, until the block ends."""
    saved = config._attn_implementation_internal
    config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        config._attn_implementation_internal = saved


@contextmanager
def packed_dispatch(config: PretrainedConfig) -> Iterator[None]:
    """
    Send the attention of the modules that share `config` to [`packed_attention`], until the block ends.

    A decoder called inside the block builds no mask, only a description of it. The name is registered for the block
    only.
    """
    outermost = PACKED not in ALL_ATTENTION_FUNCTIONS
    if outermost:
        ALL_ATTENTION_FUNCTIONS[PACKED] = packed_attention
    try:
        with attending_with(config, PACKED), describing_masks(PACKED):
            yield
    finally:
        if outermost:
            del ALL_ATTENTION_FUNCTIONS[PACKED]


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether `module` is an attention module that looks its function up in transformers' attention interface."""
    forward = inspect.unwrap(type(module).forward)
    name = "ALL_ATTENTION_FUNCTIONS"  # some models keep an interface of their own under the same name
    return name in forward.__code__.co_names and forward.__globals__.get(name) is ALL_ATTENTION_FUNCTIONS


def counts_columns(module: nn.Module) -> bool:
    """Whether the forward of an attention module numbers the columns that it is given, instead of taking positions."""
    return "arange" in _forward_code(type(module)).co_names


def refuse_implementation(implementation: str) -> str | None:
    """Why `implementation` cannot attend over a layout, or `None` if it can."""
    if implementation in ("eager", "sdpa") or _is_flash(implementation):
        return None
    if implementation == "flex_attention":
        return (
            "`flex_attention` would need a block mask per layout, built from a dense mask of all packed tokens. Load "
            "the model with `attn_implementation='sdpa'` or a flash implementation: the numbers are the same"
        )
    return (
        f"`attn_implementation={implementation!r}` is not known to attend over variable-length segments. Use 'sdpa', "
        "'eager', 'flash_attention_2', 'flash_attention_3', 'flash_attention_4' or a Hub flash-attention kernel"
    )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attend over the segments of a layout: transformers' attention function of a packed forward.

    Args:
        module (`torch.nn.Module`):
            The attention module.
        query (`torch.Tensor` of shape `(1, N, T, D)`), key, value (`torch.Tensor` of shape `(1, K, T, D)`):
            States of the packed tokens.
        attention_mask ([`PackedMask`], *optional*):
            What the decoder asked of its mask: windows and chunks within the rows that the layout keeps apart.
        **kwargs:
            What the module hands to its attention function (`scaling`, `dropout`, `sliding_window`, `softcap`,
            `s_aux`), and the layout.

    Returns:
        `tuple[torch.Tensor, None]`: attended values `(1, T, N, D)`, and no attention weights.

    Raises:
        PaddingRemovalError: If the module hands over something that the layout does not account for.
    """
    call: PackedCall | None = kwargs.pop(LAYOUT, None)
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if call is None:
        raise PaddingRemovalError(
            f"{name} did not receive the layout of the packed batch: its decoder does not hand keyword arguments down "
            "to its attention. Padding cannot be removed from this model; train it with `padding_free=False`."
        )
    if attention_mask is not None or query.shape[2] == 1:
        kwargs.pop("is_causal", None)  # many modules mean by it that they have no mask to tell them (GPT-2 before 5.0)
    _check_arguments(name, module, kwargs)
    asked = _asked(name, module, attention_mask, call, kwargs)
    for ignored in _IGNORED:
        kwargs.pop(ignored, None)
    if not _is_flash(call.implementation):  # which knows no mask, only what the module hands over
        kwargs |= {"sliding_window": asked.window, "attention_chunk_size": asked.chunk}

    # From here on the module is what it was before, for functions that ask it for its implementation.
    with attending_with(module.config, call.implementation):
        attend = _own_function(module, call.implementation)
        if _is_flash(call.implementation):
            return _flash(attend, module, query, key, value, call.layout, kwargs), None
        if call.implementation == "sdpa" and _torch_varlen_applies(query, value, call.layout, kwargs):
            return _torch_varlen(query, key, value, call.layout, kwargs), None
        return _by_segment(attend, module, query, key, value, call.layout, kwargs), None


def _check_arguments(name: str, module: nn.Module, kwargs: dict[str, Any]) -> None:
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise PaddingRemovalError(
            f"{name} attends in both directions, and a packed batch is attended causally. Padding can only be removed "
            "from causal decoders; use `padding_free=False`."
        )
    if kwargs.get("output_attentions"):
        raise PaddingRemovalError(
            "`output_attentions=True` asks for `(B, N, L, L)` weights, which a packed forward never computes. Leave "
            "it off, or remove the handle for this call (`with handle.disabled(): ...`)."
        )
    unknown = [k for k, v in kwargs.items() if k not in _UNDERSTOOD and isinstance(v, torch.Tensor)]
    if unknown:
        raise PaddingRemovalError(
            f"{name} hands {unknown} to its attention function, and a layout does not say how to pack that. Padding "
            "cannot be removed from this model; train it with `padding_free=False`."
        )


def _asked(name: str, module: nn.Module, mask: Any, call: PackedCall, kwargs: dict[str, Any]) -> PackedMask:
    """What `module` is to leave out within a row: as its mask says, or without one what it hands over."""
    span = max(call.layout.spans)
    chunk = getattr(module.config, "attention_chunk_size", None)
    unknown = PackedMask(window=kwargs.get("sliding_window"), custom=chunk is not None and chunk < span)
    asked = unknown if mask is None else mask
    if not isinstance(asked, PackedMask) or asked.custom:
        raise PaddingRemovalError(
            f"{name} attends with a mask of its own making, which a layout does not say how to pack. Padding cannot "
            "be removed from this model; train it with `padding_free=False`."
        )
    if not asked.causal:
        raise PaddingRemovalError(
            f"{name} attends in both directions, and a packed batch is attended causally. Padding can only be removed "
            "from causal decoders; use `padding_free=False`."
        )
    if _is_flash(call.implementation) and asked.chunk is not None and asked.chunk < span:
        raise PaddingRemovalError(
            f"{name} attends in chunks of {asked.chunk} tokens and a row of the batch spans {span}; FlashAttention "
            "cannot keep chunks apart. Load the model with `attn_implementation='sdpa'`."
        )
    return asked


def _flash(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
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


def _by_segment(
    attend: Callable,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The model's `sdpa` or `eager` function on one block of one segment at a time."""
    window: int | None = kwargs.get("sliding_window")
    chunk: int | None = kwargs.get("attention_chunk_size")
    is_eager = attend is _eager_function(module)
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


def _torch_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]
) -> torch.Tensor:
    """torch's own variable-length FlashAttention, which takes `(T, heads, D)` and any grouping of heads."""
    from torch.nn.attention.varlen import varlen_attn

    window = kwargs.get("sliding_window")
    output = varlen_attn(
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


def _torch_varlen_applies(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]) -> bool:
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
        ctx.layout = layout
        return states.index_select(2, layout.key_index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        layout: Layout = ctx.layout
        segments, indices = grads[0].split(layout.key_lengths, dim=2), layout.key_index.split(layout.key_lengths)
        shared = [k - q for k, q in zip(layout.key_lengths, layout.query_lengths, strict=True)]
        states = torch.cat([segment[:, :, n:] for segment, n in zip(segments, shared, strict=True)], dim=2)
        for segment, index, n in zip(segments, indices, shared, strict=True):
            if n:
                states.index_add_(2, index[:n], segment[:, :, :n])
        return states, None


def _is_flash(implementation: str) -> bool:
    return implementation.startswith("flash_attention") or ("/" in implementation and "flash" in implementation)


def _own_function(module: nn.Module, implementation: str) -> Callable:
    return _eager_function(module) if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]


def _eager_function(module: nn.Module) -> Callable:
    """The eager function that `module` falls back to, found where its forward would find it."""
    code = _forward_code(type(module))
    name = next((n for n in code.co_names if n.startswith("eager")), "eager_attention_forward")
    return getattr(sys.modules[_defining_module(type(module))], name)


@cache
def _defining_module(cls: type) -> str:
    return inspect.unwrap(cls.forward).__module__


@cache
def _forward_code(cls: type) -> Any:
    return inspect.unwrap(cls.forward).__code__
