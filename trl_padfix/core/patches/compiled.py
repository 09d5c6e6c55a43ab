"""
Decoder layers compiled one by one for packed forwards.

A whole model, compiled for the shapes of its batches, would be recompiled at every step. A layer is compiled once for
all lengths: the layout is in its arguments as tensors, and its attention is one call of torch's variable-length
kernel. The compiler traces a twin of the layer: the twin has the same parameters, buffers and children, and a config
that names the attention of this module. Padded forwards, generation and saving never use the twin.

Calls without that kernel (on a CPU, in float32) run uncompiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.fx.experimental import _config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..attention.attention import (
    ViewPatch,
    is_half_on_gpu,
    torch_varlen,
    torch_varlen_is_complete,
    uses_attention_interface,
)
from ..attention.segments import GatherKeys, by_token, in_attention_dtype
from ..call.calls import CALL, PackedCall, call_of, is_checkpointed, running
from ..handle import PaddingRemoval
from ..model.inspection import without_checkpointing
from ..model.older import checkpoints_in_forward, register_mask_function
from ..model.patching import ForwardPatch, patches_on
from ..model.positions import PackedMask, describe_mask
from ..model.views import config_of


__all__ = ["CompiledLayerPatch", "compile_layers"]

logger = logging.get_logger(__name__)

_shapes: Any = _config  # `Any`, because `patch` is added at run time
_graphs: Any = dynamo_config

# Attributes of configs, each with the feature of attention that it switches on and that no operator computes.
_WITHOUT_OPERATOR = {
    "attention_dropout": "dropout",
    "attn_pdrop": "dropout",
    "attn_logit_softcapping": "a softcap",
    "attention_chunk_size": "chunks",
}

GRAPHS = 256
"""Maximum number of graphs of all kinds of layers, which share the code of one function; dynamo's own limit is 8."""

COMPILED = "trl_padfix_compiled"
"""Name of the attention of compiled layers among transformers' functions."""


class Segments(NamedTuple):
    """
    A layout as an argument of a compiled layer: tensors, lengths of the longest segments, and the window of its mask.

    `keys` are `key_index` and the two tensors of `key_sort_order`, arguments of [`GatherKeys`]. `keys` and
    `cu_seqlens_k` are `None` if keys are queries. `window` counts tokens; `None` without a window.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    keys: tuple[Any, ...] | None
    longest_query: int
    longest_key: int
    window: int | None


def compile_layers(handle: PaddingRemoval, *, backend: str, mode: str | None = None) -> dict[str, str]:
    """
    Compile the decoder layers of an attached model for its packed forwards.

    Args:
        handle ([`PaddingRemoval`]):
            The handle of the model.
        backend (`str`):
            As for [`torch.compile`].
        mode (`str`, *optional*):
            As for [`torch.compile`].

    Returns:
        `dict[str, str]`: the layers that run uncompiled, by name, each with the reason. A warning names them, too.
    """
    ALL_ATTENTION_FUNCTIONS.register(COMPILED, attend_compiled)
    register_mask_function(COMPILED, describe_mask)
    patches, uncompiled, functions = [], {}, {}
    for name, layer in handle.anatomy.mixers.layers.items():
        if not any(uses_attention_interface(m) for m in layer.modules()):
            continue
        if (reason := _obstacle(layer, handle.decoder)) is not None:
            uncompiled[name] = reason
            continue
        # One compiled function for each kind of layer: the window is a constant of its graph.
        windows = (m.sliding_window for m in layer.modules() if getattr(m, "sliding_window", None))
        kind = type(layer), getattr(layer, "attention_type", None), next(windows, None)
        if kind not in functions:
            functions[kind] = _compiled(without_checkpointing(type(layer)), backend, mode)
        patches.append(CompiledLayerPatch(layer, handle, functions[kind]))
    handle.attach(patches)
    for reason in dict.fromkeys(uncompiled.values()):
        names = [name for name, why in uncompiled.items() if why == reason]
        span = " to ".join(dict.fromkeys([names[0], names[-1]]))
        logger.warning(f"{len(names)} of {len(uncompiled) + len(patches)} layers run uncompiled ({span}): {reason}.")
    return uncompiled


class CompiledLayerPatch(ForwardPatch):
    """Runs the compiled twin of a layer in packed forwards."""

    serves_recomputation = True

    def __init__(self, module: nn.Module, attachment: PaddingRemoval, compiled: Callable):
        super().__init__(module, attachment)
        self.compiled = compiled
        self._twins: list[tuple[nn.Module, nn.Module]] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_twins": []}  # a deep copy of the layer has other parameters, and so other twins

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, kwargs)
        if call is None or (segments := _segments(call, kwargs.get("attention_mask"))) is None:
            return self.wrapped(*args, **kwargs)
        states = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if not is_half_on_gpu(*in_attention_dtype(states[:0])):  # an empty slice: a cast would copy the states
            self.attachment.say_once("Layers run uncompiled: their attention needs half precision on a CUDA GPU.")
            return self.wrapped(*args, **kwargs)
        arguments = {**kwargs, "attention_mask": None, CALL: segments}

        def run(*args: Any) -> Any:
            # `use_duck_shape=False`: two sizes that are equal by chance in one batch stay two symbols, without a
            # recompilation when they differ. `optimize_ddp=False`: within DDP dynamo would cut a layer at the buckets
            # of its gradients, but a single layer is small, and its sizes are not known at compile time.
            with _shapes.patch(use_duck_shape=False), _graphs.patch(optimize_ddp=False, recompile_limit=GRAPHS):
                return self.compiled(self._twin(), *args, **arguments)

        with running(call):
            # The compiler would trace checkpointing, too: it is applied here, outside of the compiled code.
            if is_checkpointed(self.module) and checkpoints_in_forward():
                return self.module._gradient_checkpointing_func(run, *args)
            return run(*args)

    def _twin(self) -> nn.Module:
        if not self._twins:
            _make_twin(self.module, self._twins)
        for twin, module in self._twins:
            # The twin has a copy of the flag, which `train()` and `eval()` do not reach.
            twin.__dict__["training"] = module.training
        return self._twins[-1][0]


def attend_compiled(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The attention function of a compiled layer; see [`packed_attention`]."""
    segments: Segments = kwargs[CALL]
    if kwargs.get("dropout") or kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            f"A compiled {type(module).__name__} has no dropout, softcap or sinks in its attention. Set "
            "`torch_compile=False`."
        )
    query, key, value = in_attention_dtype(query, key, value)
    key, value = GatherKeys.apply(key, value, *segments.keys) if segments.keys else (by_token(key), by_token(value))
    ends = segments.cu_seqlens_q, segments.cu_seqlens_q if segments.cu_seqlens_k is None else segments.cu_seqlens_k
    longest = segments.longest_query, segments.longest_key
    scale = kwargs.get("scaling")
    return torch_varlen(by_token(query), key, value, (*ends, *longest), scale, segments.window).unsqueeze(0), None


def _segments(call: PackedCall, mask: object) -> Segments | None:
    """The layout as arguments of a compiled layer; `None` if the call needs more than causal attention in a window."""
    layout = call.layout
    mask_spec = PackedMask() if mask is None else mask
    if not isinstance(mask_spec, PackedMask) or mask_spec.custom or not mask_spec.causal:
        return None
    # With prefix states the layer reads keys and values of other forwards, or records its own.
    if call.prepared is not None or call.prefix_states is not None or call.tokens.is_divided:
        return None
    # Windows and chunks as long as the longest row hide nothing.
    span = max(layout.spans)
    window = mask_spec.window if mask_spec.window is not None and mask_spec.window < span else None
    has_chunks = mask_spec.chunk is not None and mask_spec.chunk < span
    # Windows of operators count tokens, windows of masks count columns: equal unless tokens within a row are masked.
    if has_chunks or (window and layout.spans != layout.keys.lengths):
        return None
    if layout.key_index is None:
        cu_seqlens, longest = layout.queries.cu_seqlens, layout.queries.longest
        if layout.filler is not None:
            # `packed_multiple_of` limits the number of different row lengths. The number of segments and the bound of
            # their lengths are rounded up to powers of two, so that there are few of these, too. The segments that
            # this adds are empty, and kernels skip them.
            empty = _power_of_two(len(cu_seqlens)) - len(cu_seqlens)
            cu_seqlens = functional.pad(cu_seqlens, (0, empty), value=layout.packed_tokens)
            longest = _power_of_two(longest)
        return Segments(cu_seqlens, None, None, longest, longest, window)
    order = layout.key_sort_order if torch.is_grad_enabled() else (None, None)
    keys = layout.key_index, *order
    q, k = layout.queries, layout.keys
    return Segments(q.cu_seqlens, k.cu_seqlens, keys, q.longest, k.longest, window)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is not less than `n`."""
    return 1 << (n - 1).bit_length()


def _obstacle(layer: nn.Module, decoder: nn.Module) -> str | None:
    """Why a layer runs uncompiled, or `None`."""
    config: Any = decoder.config
    if config._attn_implementation != "sdpa":
        return f"`attn_implementation={config._attn_implementation!r}` is not compiled; load the model with 'sdpa'"
    for name, feature in _WITHOUT_OPERATOR.items():
        if value := getattr(config, name, None):
            return f"`{name}={value}`: there is no operator for attention with {feature}"
    if any(hasattr(module, "sinks") for module in layer.modules()):
        return "there is no operator for attention with sinks"
    for module in layer.modules():
        for patch in patches_on(module)[:1]:
            if not isinstance(patch, ViewPatch):
                return f"`{type(module).__name__}` does not run in direct mode ({type(patch).__name__})"
    if any(config_of(m) is None for m in layer.modules() if uses_attention_interface(m)):
        return "an attention module has no config, in which the name of compiled attention could be set"
    if not torch_varlen_is_complete():
        return "this torch or GPU has no variable-length attention (torch 2.11 or later, Ampere or newer)"
    return None


def _compiled(forward: Callable, backend: str, mode: str | None) -> Callable:
    """`forward`, compiled for all lengths."""

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, *args, **kwargs)

    return torch.compile(call, backend=backend, mode=mode, fullgraph=True, dynamic=True)


def _make_twin(module: nn.Module, twins: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """
    A module with the state of `module` and a config that names compiled attention.

    Pairs of twin and module are appended to `twins`, those within `module` first.
    """
    # Without the instance attribute `forward`, which holds the patches of the module: the twin runs without them.
    twin = object.__new__(type(module))
    twin.__dict__.update({k: v for k, v in vars(module).items() if k != "forward"})
    if uses_attention_interface(module):
        config: Any = copy.copy(module.config)
        twin.__dict__["config"] = config
        # Bypasses the setter, which would also write into the sub-configs: a shallow copy shares these.
        config._attn_implementation_internal = COMPILED
    children = dict(module._modules)
    for name, child in children.items():
        if child is not None and any(uses_attention_interface(m) for m in child.modules()):
            children[name] = _make_twin(child, twins)
    twin.__dict__["_modules"] = children
    twins.append((twin, module))
    return twin
