"""
Attention over a layout, with the model's own attention functions.

In a packed forward the attention modules of a decoder run on views whose config names [`packed_attention`]. It
computes each segment of the layout with the function that the model is configured for, so scaling, softcap, sinks and
grouped heads are the model's own:

- FlashAttention (`flash_attention_2/3/4`, Hub kernels), and functions of yours that take segments
  ([`takes_segments`]): one variable-length call, `cu_seqlens` from the layout, keys gathered per segment;
- `sdpa`: on CUDA in half precision torch's variable-length FlashAttention, which needs no package; else
  scaled-dot-product attention, segment by segment (`segments.py`);
- `eager`: the model's eager function, segment by segment.

No mask is larger than one block of queries of one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..call.calls import CALL, PackedCall, call_of, layer_call, running
from ..context import context
from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from ..model.inspection import forward_of, global_in, globals_of, names_in, parameters_of
from ..model.older import register_mask_function, segment_arguments
from ..model.patching import ForwardPatch
from ..model.positions import PackedMask, describe_mask
from ..model.views import PACKED_ATTENTION, viewed_module
from .segments import attend_by_segment, by_token, gather_keys, gather_tokens, in_attention_dtype


__all__ = [
    "ViewPatch", "attends_within_tokens", "implementation_obstacle", "is_causal", "is_half_on_gpu", "names_attention",
    "packed_attention", "register_packed_attention", "takes_segments", "torch_varlen", "torch_varlen_applies",
    "torch_varlen_is_complete", "uses_attention_interface",
]  # fmt: skip

# Arguments of attention functions that the layout already accounts for. They are removed before the call.
_IGNORED = {"position_ids", "cache_position", "position_embeddings", "use_cache", "is_causal", "output_attentions"} | {
    "num_items_in_batch",  # of the loss; older models pass it on to their layers
    "mm_token_type_ids",  # image or text token; transformers up to 5.0 passes it on to every layer
}
_ARGUMENTS = {"s_aux", "softcap", "dropout", "scaling", "sliding_window"}
"""Arguments that attention functions get."""


def register_packed_attention() -> None:
    """Register packed attention and its mask function with transformers, for good; a second call changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)
    register_mask_function(PACKED_ATTENTION, describe_mask)


def uses_attention_interface(module: nn.Module) -> bool:
    """Whether tokens attend to each other in `module` by a function of transformers' attention interface."""
    return _reads_interface(module) and not attends_within_tokens(module)


def _reads_interface(module: nn.Module) -> bool:
    """Whether the forward of `module` takes its attention function from transformers' interface."""
    # Some models define an interface of their own under the same name.
    return global_in(module, "ALL_ATTENTION_FUNCTIONS") is ALL_ATTENTION_FUNCTIONS


def is_causal(module: nn.Module) -> bool:
    """Whether a module is causal, as transformers marks attention modules; other modules are."""
    return getattr(module, "is_causal", True)


def attends_within_tokens(module: nn.Module) -> bool:
    """
    Whether an attention module attends to several states of one token (Inkling 2: those of earlier layers).

    Two signs: the module is not causal, and its forward takes no mask, without which it could not keep tokens apart.
    """
    if is_causal(module) or not _reads_interface(module):
        return False
    parameters = parameters_of(forward_of(module)).values()
    return not any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in parameters)


def names_attention(module: nn.Module) -> bool:
    """Whether a module reads the name of the attention from its config: to attend, or to make masks for its layers."""
    names = names_in(type(module).forward) if isinstance(module, PreTrainedModel) else ()
    return uses_attention_interface(module) or any(n.startswith("create_") and "mask" in n for n in names)


def takes_segments(implementation: str) -> bool:
    """
    Whether an attention function takes all segments in one call, by `cu_seq_lens_q` and `cu_seq_lens_k`.

    FlashAttention does, and a function of yours with these two parameters, registered with transformers. It gets the
    queries `(1, N, T, D)` of all segments, their keys and values `(1, K, T', D)`, gathered for each segment, no mask,
    and `max_length_q`, `max_length_k`, `scaling`, `dropout` and, for layers with a window, `sliding_window`. The last
    query of a segment sees all of its keys, and each query before it one key less. It returns the values
    `(1, T, N, D)` and `None`. Padded forwards, as in the parity check, call it without these parameters, with a mask.
    """
    if implementation in ("eager", "sdpa"):
        return False
    return _is_flash(implementation) or {"cu_seq_lens_q", "cu_seq_lens_k"} <= _parameters_of(implementation)


def _is_flash(implementation: str) -> bool:
    return implementation.startswith("flash_attention") or ("/" in implementation and "flash" in implementation)


def _parameters_of(implementation: str) -> set[str]:
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return set() if function is None else {*parameters_of(function)}


def implementation_obstacle(implementation: str) -> str | None:
    """Why `implementation` cannot attend over a layout, or `None` if it can."""
    if implementation in ("eager", "sdpa") or takes_segments(implementation):
        return None
    if implementation == "flex_attention":
        return (
            "`flex_attention` would need a block mask per layout, built from a dense mask of all packed tokens. Load "
            "the model with `attn_implementation='sdpa'` or a flash implementation: the numbers are the same"
        )
    return (
        f"`attn_implementation={implementation!r}` is not known to attend over variable-length segments. Use 'sdpa', "
        "'eager', 'flash_attention_2', 'flash_attention_3', 'flash_attention_4', a Hub flash-attention kernel, or "
        "register a function with the parameters `cu_seq_lens_q` and `cu_seq_lens_k`; "
        "`remove_padding(model, attn_implementation=...)` exchanges that of a loaded model"
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
    Attend over the segments of a layout: the attention function of transformers in a packed forward.

    Args:
        module (`torch.nn.Module`):
            The attention module, or a view of it.
        query (`torch.Tensor` of shape `(1, N, T, D)`):
            Queries of the packed row; with context parallelism those of the local tokens.
        key (`torch.Tensor` of shape `(1, K, T, D)`):
            Keys, likewise.
        value (`torch.Tensor` of shape `(1, K, T, D)`):
            Values, likewise.
        attention_mask ([`PackedMask`], *optional*):
            Description of the mask that the decoder made for this layer.

    Returns:
        `tuple` of the attended values, `(1, T, N, D)`, and `None` for the weights, which are not computed.

    Raises:
        PaddingRemovalError: If the module passes something that the layout does not account for.
    """
    module = viewed_module(module)  # the model's functions must find the module's own config
    call: PackedCall | None = kwargs.pop(CALL, None)
    if call is None and (running_layer := layer_call()) is not None:
        call = running_layer.call  # for layers that do not pass keyword arguments on
    if call is None:
        raise _unpackable(
            f"{_name(module)} did not receive the layout of the packed batch: its decoder does not pass keyword "
            "arguments on to its attention"
        )
    tokens = call.tokens.count
    if query.shape[2] != tokens or key.shape[2] != tokens:
        raise _unpackable(
            f"{_name(module)} attends from {query.shape[2]} queries to {key.shape[2]} keys, and the packed batch has "
            f"{tokens} tokens: expected one query and one key per token"
        )
    if attention_mask is not None or query.shape[2] == 1:
        # Many modules pass `is_causal` only in place of a mask, so beside one it means nothing (GPT-2 before 5.0).
        kwargs.pop("is_causal", None)
    masks = _prepared_masks(module, attention_mask, call)
    mask_spec = PackedMask() if masks is not None else _mask_of_layer(module, attention_mask, call, kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in _IGNORED and k not in call.passed_on}
    if unknown := [k for k, v in kwargs.items() if k not in _ARGUMENTS and isinstance(v, torch.Tensor)]:
        raise _unpackable(
            f"{_name(module)} passes {unknown} to its attention function, and it is unknown how to pack that"
        )
    # FlashAttention takes its window from the module. The other functions have windows and chunks in their masks.
    if not takes_segments(name := call.implementation):
        kwargs |= {"sliding_window": mask_spec.window, "attention_chunk_size": mask_spec.chunk}
    elif not _is_flash(name) and mask_spec.window is not None:
        if "sliding_window" not in _parameters_of(name) or call.layout.spans != call.layout.keys.lengths:
            missing = "has no parameter `sliding_window` (add it), or a row has masked tokens between real ones"
            raise _unpackable(f"{_name(module)} has a window, and {name!r} {missing}")
        kwargs["sliding_window"] = mask_spec.window

    return call.tokens.attend(partial(_attend, call, masks), module, query, key, value, kwargs), None


def _attend(
    call: PackedCall,
    masks: list[torch.Tensor] | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention over a layout with the function that the model is configured for: `(1, N, T, D)` to `(1, T, N, D)`."""
    implementation = call.implementation
    attend = _function_of(module, implementation)
    if call.prefix_states is not None:  # with context parallelism those of the local heads, after the exchange
        key, value = call.prefix_states.prepend_kv(module, key, value)
    is_eager = implementation == "eager"
    if not is_eager:
        query, key, value = in_attention_dtype(query, key, value)
    is_varlen = takes_segments(implementation)
    if not is_varlen and not is_eager and masks is None and torch_varlen_applies(query, value, layout, kwargs):
        key, value = gather_tokens(layout, key, value)
        segments = layout.queries.cu_seqlens, layout.keys.cu_seqlens, layout.queries.longest, layout.keys.longest
        scale, window = kwargs.get("scaling"), kwargs.get("sliding_window")
        return torch_varlen(by_token(query), key, value, segments, scale, window).unsqueeze(0)
    key, value = gather_keys(layout, key, value)
    if is_varlen:
        return attend(module, query, key, value, None, **segment_arguments(layout), **kwargs)[0]
    options = {"is_eager": is_eager, "masks": masks, "fixed_order": call.fixed_order}
    return attend_by_segment(attend, module, query, key, value, layout, kwargs, **options)


def _unpackable(reason: str) -> PaddingRemovalError:
    remedy = "Padding cannot be removed from this model; train it with `padding_free=False`."
    return PaddingRemovalError(f"{reason}. {remedy}")


def _name(module: nn.Module) -> str:
    return f"{type(module).__name__} (layer {vars(module).get('layer_idx', '?')})"


def _prepared_masks(module: nn.Module, mask: PackedMask | None, call: PackedCall) -> list[torch.Tensor] | None:
    """The prepared mask of a layer, cut into one for each segment; `None` if no mask was prepared."""
    if (prepared := call.prepared) is None:
        return None
    kind = mask.kind if isinstance(mask, PackedMask) else None
    if takes_segments(call.implementation) or not {None, kind} & prepared.masks.keys():
        raise PaddingRemovalError(
            f"{_name(module)} must attend with a prepared mask, but {call.implementation} has no such mask. Load the "
            "model with `attn_implementation='sdpa'`, or train it with `padding_free=False`."
        )
    return call.cached(("prepared", kind), lambda: prepared.of_segments(kind, call.layout))


def _mask_of_layer(module: nn.Module, mask: object, call: PackedCall, kwargs: dict[str, Any]) -> PackedMask:
    """Which keys `module` leaves out within a row: by its mask, or without one by its other arguments."""
    span = max(call.layout.spans)
    if (mask_spec := mask) is None:
        # A module without a mask passes its window as an argument, but not its chunks: rows longer than a chunk cannot
        # be packed exactly then.
        chunk = getattr(module.config, "attention_chunk_size", None)
        mask_spec = PackedMask(window=kwargs.get("sliding_window"), custom=chunk is not None and chunk < span)
    if not isinstance(mask_spec, PackedMask) or mask_spec.custom:
        raise _unpackable(f"{_name(module)} builds its own attention mask, which cannot be packed")
    if not mask_spec.causal or kwargs.get("is_causal") is False or not is_causal(module):
        raise PaddingRemovalError(
            f"{_name(module)} attends in both directions, and a packed batch is attended causally. Padding can only "
            "be removed from causal decoders; use `padding_free=False`."
        )
    if mask_spec.chunk is not None and mask_spec.chunk < span and takes_segments(call.implementation):
        raise PaddingRemovalError(
            f"{_name(module)} attends in chunks of {mask_spec.chunk} tokens and a row of the batch spans {span}; "
            "FlashAttention cannot keep chunks apart. Load the model with `attn_implementation='sdpa'`."
        )
    return mask_spec


def _function_of(module: nn.Module, implementation: str) -> Callable:
    """The attention function that `module` would call in a padded forward."""
    if implementation != "eager":
        return ALL_ATTENTION_FUNCTIONS[implementation]
    # The eager function is a global of the file of the module, by default `eager_attention_forward`.
    name = next((n for n in names_in(type(module).forward) if n.startswith("eager")), "eager_attention_forward")
    return globals_of(module)[name]


class ViewPatch(ForwardPatch):
    """Runs a module that attends, or makes masks, on a view whose config names packed attention."""

    serves_recomputation = runs_on_view = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        # The call decides, not `enabled`: a recomputed forward is packed as the first one was, even if padding
        # removal was switched off in between.
        if (call := call_of(self, kwargs)) is None:
            return self.on_view()(*args, **kwargs) if context().attention else self.wrapped(*args, **kwargs)
        with running(call):  # perhaps in a recomputation
            return self.on_view()(*args, **kwargs)


logger = logging.get_logger(__name__)


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
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *segments, 0.0, is_causal, False, scale=scale, window_size_left=left, window_size_right=0
    )[0]


def is_half_on_gpu(*states: torch.Tensor) -> bool:
    """Whether states are in half precision on a CUDA GPU, as variable-length kernels need them."""
    return all(x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16) for x in states)


def torch_varlen_applies(query: torch.Tensor, value: torch.Tensor, layout: Layout, kwargs: dict[str, Any]) -> bool:
    """
    Whether torch's variable-length kernel computes this attention.

    In half precision on CUDA it should. If it cannot, a warning says why, once.
    """
    if not is_half_on_gpu(query):
        return False
    size, names = query.shape[-1], {"softcap": "a softcap", "s_aux": "sinks", "attention_chunk_size": "chunks"}
    missing = [what for name, what in names.items() if kwargs.get(name) is not None]
    if kwargs.get("dropout"):
        missing.append(f"a dropout of {kwargs['dropout']}")
    if value.shape[-1] != size or size > 256 or size % 8:
        missing.append(f"heads of {size} and {value.shape[-1]} dimensions (at most 256, in multiples of 8)")
    # The kernel's window counts tokens, that of a padded mask columns: equal unless tokens within a row are masked.
    if kwargs.get("sliding_window") is not None and layout.spans != layout.keys.lengths:
        missing.append("a window over masked tokens within a row")
    if not torch.backends.cuda.flash_sdp_enabled():
        missing.append("a setting that switches it off (`sdpa_kernel`)")
    if not torch_varlen_is_complete():
        missing.append(f"this torch ({torch.__version__}) or GPU (needed: torch 2.11, Ampere)")
    if missing:
        logger.warning_once(
            "One attention call per row, which is exact but slow: torch's variable-length "
            f"FlashAttention does not support {', '.join(missing)}. FlashAttention 2 or 3 may."
        )
    return not missing


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
