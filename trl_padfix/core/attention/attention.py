"""
Attention over a layout, with the model's own attention functions.

Inside a packed forward the attention modules of a decoder find [`packed_attention`] under the name that their view has
for it. It computes each segment of the layout with the function that the model is configured for, so scaling, softcap,
sinks and grouped heads are the model's own:

- FlashAttention (`flash_attention_2/3/4`, Hub kernels): one variable-length call, `cu_seqlens` from the layout, keys
  gathered per segment;
- `sdpa`: torch's variable-length FlashAttention on CUDA in half precision, without any package to install; else
  scaled-dot-product attention, segment by segment;
- `eager`: the model's eager function, segment by segment.

No mask is larger than one block of one segment.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..call.calls import LAYOUT, PackedCall, packed_call
from ..call.layers import layer_call
from ..context import context, within
from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from ..model.masks import PackedMask, describe_mask
from ..model.older import register_mask_function
from ..model.patching import ForwardPatch
from ..model.views import PACKED_ATTENTION, viewed_module
from ..parallel.attention import attend_context_parallel
from .segments import attend_by_segment, in_attention_dtype
from .varlen import attend_torch_varlen, attend_varlen, torch_varlen_applies


__all__ = [
    "ViewPatch",
    "counts_columns",
    "names_attention",
    "packed_attention",
    "refuse_implementation",
    "register_packed_attention",
    "uses_attention_interface",
]


# Per-token or per-model arguments that the attention functions receive and that the layout already accounts for.
_IGNORED = {"position_ids", "cache_position", "position_embeddings", "use_cache", "is_causal", "output_attentions"} | {
    "num_items_in_batch",  # the loss's, which older models hand down to their layers
    "mm_token_type_ids",  # up to transformers 5.0 what tells images from text goes down to every layer
}
_UNDERSTOOD = _IGNORED | {"s_aux", "softcap", "dropout", "scaling", "sliding_window"}


def register_packed_attention() -> None:
    """Enter packed attention and its masks in transformers' registers, for good; registering again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    register_mask_function(PACKED_ATTENTION, describe_mask)


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether `module` is an attention module that looks its function up in transformers' attention interface."""
    forward = inspect.unwrap(type(module).forward)
    name = "ALL_ATTENTION_FUNCTIONS"  # some models keep an interface of their own under the same name
    return name in forward.__code__.co_names and forward.__globals__.get(name) is ALL_ATTENTION_FUNCTIONS


def names_attention(module: nn.Module) -> bool:
    """Whether a module asks its config which attention to use: to attend, or to make the masks of its layers."""
    if uses_attention_interface(module):
        return True
    if not isinstance(module, PreTrainedModel) or not hasattr(module, "config"):
        return False
    return any(name.startswith("create_") and "mask" in name for name in _forward_code(type(module)).co_names)


def counts_columns(module: nn.Module) -> bool:
    """Whether the forward of an attention module numbers the columns that it is given, instead of taking positions."""
    code = _forward_code(type(module))
    if "arange" in code.co_names:
        return True
    # Or it computes with those of the cache: with an attribute of them, or by a function of its file.
    loads = " ".join(f"{i.opname} {i.argval}" for i in dis.get_instructions(code))
    # Some versions of Python load two at once.
    loaded = r"LOAD_FAST\w* (\('\w+', '|)cache_position'?\)? LOAD_(ATTR|METHOD)"
    given = r"LOAD_GLOBAL \S+ LOAD_FAST\w* (\('|)cache_position"
    return bool(re.search(f"{loaded}|{given}", loads))


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

    From queries `(1, N, T, D)` and keys and values `(1, K, T, D)` to attended values `(1, T, N, D)`, without weights.
    The mask says what the decoder asked for within the rows that the layout keeps apart.

    Raises:
        PaddingRemovalError: If the module hands over something that the layout does not account for.
    """
    module = viewed_module(module)  # so that the model's own functions find its own implementation
    call: PackedCall | None = kwargs.pop(LAYOUT, None)
    if call is None and (frame := layer_call()) is not None:
        call = frame.call  # the layer does not hand keyword arguments down
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if call is None:
        raise _refusal(
            f"{name} did not receive the layout of the packed batch: its decoder does not hand keyword arguments down "
            "to its attention"
        )
    tokens = call.own_tokens
    if query.shape[2] != tokens or key.shape[2] != tokens:
        raise _refusal(
            f"{name} attends from {query.shape[2]} to {key.shape[2]} states, and the packed batch has {tokens} "
            "tokens: they are not one for each token"
        )
    if call.prefix_states is not None:
        key, value = call.prefix_states.extend(module, key, value)
    if attention_mask is not None or query.shape[2] == 1:
        kwargs.pop("is_causal", None)  # many modules mean by it that they have no mask to tell them (GPT-2 before 5.0)
    masks = _prepared_masks(name, attention_mask, call)
    if unknown := [k for k, v in kwargs.items() if k not in _UNDERSTOOD and isinstance(v, torch.Tensor)]:
        raise _refusal(f"{name} hands {unknown} to its attention function, and a layout does not say how to pack that")
    asked = PackedMask() if masks is not None else _mask_of_layer(name, module, attention_mask, call, kwargs)
    for ignored in _IGNORED:
        kwargs.pop(ignored, None)
    if not _is_flash(call.implementation):  # which knows no mask, only what the module hands over
        kwargs |= {"sliding_window": asked.window, "attention_chunk_size": asked.chunk}

    attend = partial(_attend, call.implementation, masks)
    if call.cp_layout is not None:
        return attend_context_parallel(attend, module, query, key, value, call.cp_layout, kwargs), None
    return attend(module, query, key, value, call.layout, kwargs), None


def _attend(
    implementation: str,
    masks: list[torch.Tensor] | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention over a layout by the function of an implementation, `(1, N, T, D)` to `(1, T, N, D)`."""
    attend = _own_function(viewed_module(module), implementation)
    if _is_flash(implementation):
        return attend_varlen(attend, module, query, key, value, layout, kwargs)
    is_eager = implementation == "eager"
    if not is_eager:
        query, key, value = in_attention_dtype(query, key, value)
        if masks is None and torch_varlen_applies(query, value, layout, kwargs):
            return attend_torch_varlen(query, key, value, layout, kwargs)
    return attend_by_segment(attend, module, query, key, value, layout, kwargs, is_eager=is_eager, masks=masks)


def _refusal(reason: str) -> PaddingRemovalError:
    remedy = "Padding cannot be removed from this model; train it with `padding_free=False`."
    return PaddingRemovalError(f"{reason}. {remedy}")


def _prepared_masks(name: str, mask: Any, call: PackedCall) -> list[torch.Tensor] | None:
    """The parts of the prepared mask of a layer that belong to the segments; `None` if no mask was prepared."""
    prepared, kind = call.prepared, getattr(mask, "kind", None)
    if prepared is None:
        return None
    if _is_flash(call.implementation) or not {None, kind} & prepared.masks.keys():
        raise PaddingRemovalError(
            f"{name} is to attend with a prepared mask, and {call.implementation} knows none of its kind. Load the "
            "model with `attn_implementation='sdpa'`, or train it with `padding_free=False`."
        )
    return call.once(("prepared", kind), lambda: prepared.of_segments(kind, call.layout))


def _mask_of_layer(name: str, module: nn.Module, mask: Any, call: PackedCall, kwargs: dict[str, Any]) -> PackedMask:
    """What `module` is to leave out within a row: as its mask says, or without one what it hands over."""
    span = max(call.layout.spans)
    chunk = getattr(module.config, "attention_chunk_size", None)
    unknown = PackedMask(window=kwargs.get("sliding_window"), custom=chunk is not None and chunk < span)
    asked = unknown if mask is None else mask
    if not isinstance(asked, PackedMask) or asked.custom:
        raise _refusal(f"{name} attends with a mask of its own making, which a layout does not say how to pack")
    if not asked.causal or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
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


def _is_flash(implementation: str) -> bool:
    return implementation.startswith("flash_attention") or ("/" in implementation and "flash" in implementation)


def _own_function(module: nn.Module, implementation: str) -> Callable:
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    # The eager function that `module` falls back to, found where its forward would find it.
    name = next((n for n in _forward_code(type(module)).co_names if n.startswith("eager")), "eager_attention_forward")
    return inspect.unwrap(type(module).forward).__globals__[name]


@cache
def _forward_code(cls: type) -> Any:
    return inspect.unwrap(cls.forward).__code__


class ViewPatch(ForwardPatch):
    """Runs a module that looks its attention up, or makes masks, on a view that names packed attention."""

    serves_recomputation = runs_on_view = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        # The recomputation of a packed forward is packed, whatever was switched off in between.
        call = kwargs.get(LAYOUT) or packed_call(self.attachment.decoder)
        if call is None:
            return self.on_view()(*args, **kwargs) if context().attention else self.wrapped(*args, **kwargs)
        with within(packed=call):
            return self.on_view()(*args, **kwargs)
