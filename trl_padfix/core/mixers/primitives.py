"""
Replacements for the functions with which linear attention, state-space scans and short convolutions mix tokens.

A mixer of these kinds stays packed: its projections, norms and gates compute each token by itself. Only the functions
that it calls by the names in `_REPLACEMENTS` are replaced, and only for this mixer: it runs a copy of its forward
with globals of its own. The replacements call the original function, on the segments of the layout:

- a convolution on all segments at once, each after the few tokens before it on its path (left context);
- a recurrence on the nodes of the tree, level by level, each node from the final state of its parent; with a
  variable-length kernel where an installed package has one whose states carry gradients;
- a scan whose state carries no gradient, on rows instead of the packed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, repeat
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..attention.attention import uses_attention_interface
from ..call.calls import CALL, PackedCall, call_of, running
from ..model.inspection import global_in, kernel_parameters, loaded_globals, parameters_of, variables_in, with_globals
from ..model.patching import Attachment, ForwardPatch
from ..model.positions import PackedMask
from ..model.views import viewed_module
from .node_tree import tree_of
from .row_buckets import row_buckets


__all__ = ["LEFT_OUT", "PrimitivesPatch", "can_export_state", "chunk_of", "primitives_of"]

CHUNK = 64
"""Tokens of a chunk of flash-linear-attention's kernels, the only number that they support."""

Keys = Iterator[tuple[nn.Module, int]]
"""A name for each function call of a mixer, the same in all its forwards: other forwards find its states by it."""

Replace = Callable[[Callable, PackedCall, Keys], Callable]
"""Makes the replacement of an original function, for one packed forward of a mixer."""


def primitives_of(module: nn.Module) -> set[str]:
    """
    Names of the functions through which `module` mixes tokens; empty if it also mixes tokens in another way.

    They are read from the code of its forward, so that code on the Hub is recognized too.
    """
    # Only globals can be replaced by a copy of the forward. Older mixers keep their functions as attributes.
    if not (names := _REPLACEMENTS.keys() & loaded_globals(module)):
        return set()
    has_attention = uses_attention_interface(module) or "attention_interface" in variables_in(type(module).forward)
    has_convolution = any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())
    has_recurrence = any(name in _DECAYS for name, _ in module.named_parameters(recurse=False))
    # A convolution or recurrence that calls none of the functions is written out in the forward.
    is_written_out = (has_convolution and "causal_conv1d_fn" not in names) or (
        has_recurrence and not names & _RECURRENCES
    )
    return set() if has_attention or is_written_out else names


def can_export_state(module: nn.Module) -> bool:
    """Whether a forked mixer can continue from the states of another forward, with gradients into that forward."""
    return all(_REPLACEMENTS[name] is not _scan_on_rows for name in primitives_of(module))


def chunk_of(module: nn.Module) -> int:
    """Tokens that the recurrence of a forked mixer computes at once; 0 if it does not work by chunks."""
    size = getattr(module, "chunk_size", None)
    for name in primitives_of(module) & _CHUNKED:
        parameter = parameters_of(global_in(module, name)).get("chunk_size")
        size = size or (parameter.default if parameter is not None else None)
        return size if isinstance(size, int) else CHUNK  # no size: a kernel behind the function, or no default
    return 0


class PrimitivesPatch(ForwardPatch):
    """Runs a mixer with functions that keep the segments of the packed row apart."""

    serves_recomputation = runs_on_view = True

    def __init__(self, module: nn.Module, attachment: Attachment):
        super().__init__(module, attachment)
        # A kernel whose parameters cannot be read raises here, not in the first step.
        for name in primitives_of(module) & _CHUNKED:
            kernel_parameters(global_in(module, name))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, kwargs)
        kwargs.pop(CALL, None)
        if call is None:
            return self.wrapped(*args, **kwargs)
        kwargs = {k: None if isinstance(v, PackedMask) else v for k, v in kwargs.items()}
        forward: Any = self.on_view()
        assert isinstance(forward, MethodType), "a mixer whose forward is not a method of its class runs on rows"
        module, keys, replaced = viewed_module(self.module), zip(repeat(self.module), count()), {}
        for name in primitives_of(module):
            replaced[name] = call.tokens.mix(name, _REPLACEMENTS[name](global_in(module, name), call, keys))
        with running(call):
            return with_globals(forward.__func__, replaced)(forward.__self__, *args, **kwargs)


def _convolution(original: Callable, call: PackedCall, keys: Keys) -> Callable:
    """A short convolution on the segments, each after its left context."""
    tree = tree_of(call)

    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return original(x, weight, bias, activation=activation)

        return tree.convolve(run, hidden_states, weight.shape[-1] - 1, next(keys))

    return causal_conv1d_fn


def _delta_rule(original: Callable, call: PackedCall, keys: Keys) -> Callable:
    """Linear attention with a gated delta rule (Qwen3-Next, Kimi), on the nodes of the tree."""
    tree, is_varlen = tree_of(call), "cu_seqlens" in kernel_parameters(original)

    def chunk(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        options = {k: v for k, v in kwargs.items() if k in ("use_qk_l2norm_in_kernel", "chunk_size", "scale")}

        def kernel(
            chunks: list[torch.Tensor],
            initial: torch.Tensor | None,
            with_states: bool,
            cu_seqlens: torch.Tensor | None,
        ) -> Any:
            # Zeros beyond the end of a node leave its final state unchanged: no decay (g = 0), no write (beta = 0).
            # q, k and v are positional, because kernels have other names for them.
            q, k, v, decay, write = chunks
            arguments = {"initial_state": initial, "output_final_state": with_states, **options}
            if cu_seqlens is not None:
                arguments["cu_seqlens"] = cu_seqlens
            return original(q, k, v, g=decay, beta=write, **arguments)

        return tree.scan(kernel, [query, key, value, g, beta], next(keys), is_varlen=is_varlen), None

    return chunk


def _state_space(original: Callable, call: PackedCall, keys: Keys) -> Callable:
    """The scan of Mamba 2 on the nodes of the tree, or in one call if no prefix is shared and the kernel allows."""
    parameters = kernel_parameters(original)
    tree, is_kernel, takes_seq_idx = tree_of(call), bool(parameters), "seq_idx" in parameters

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> torch.Tensor:
        # Step sizes are computed here, not in `original`: softplus(0 + bias) is not 0, and only a step size of zero
        # beyond the end of a node leaves its final state unchanged (no decay, no input).
        if is_kernel:
            dt = dt.float()  # as kernels do; the function in torch adds the bias in the model's precision
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = nn.functional.softplus(dt)
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
        if takes_seq_idx and tree.is_flat:  # the kernel resets its state where the number of the row changes
            return original(hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, seq_idx=tree.seq_idx)

        def kernel(chunks: list[torch.Tensor], initial: torch.Tensor | None, with_states: bool, _: None) -> Any:
            x, step_sizes, b, c = chunks
            states = {"initial_states": initial, "return_final_states": with_states}
            output = original(x, step_sizes, A, b, c, chunk_size=chunk_size, D=D, **states)
            return output if with_states else (output, None)

        return tree.scan(kernel, [hidden_states, dt, B, C], next(keys))

    return scan


def _scan_on_rows(original: Callable, call: PackedCall, keys: Keys) -> Callable:
    """A scan on rows, whose arguments and output have tokens in their last dimension, `(1, C, T)`."""
    rows, parameters = row_buckets(call), list(parameters_of(original))

    def rows_of_argument(name: str, value: torch.Tensor | None, bucket: int) -> torch.Tensor | None:
        if name not in ("hidden_states", "dt", "B", "C", "z") or value is None:
            return value
        return rows.gather(value.transpose(1, 2), bucket).transpose(1, 2)

    def scan(*args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = []
        for bucket in range(len(rows.tokens)):
            named_args = zip(parameters, args, strict=False)  # not strict: optional parameters have no argument
            by_place = [rows_of_argument(name, value, bucket) for name, value in named_args]
            by_name = {name: rows_of_argument(name, value, bucket) for name, value in kwargs.items()}
            outputs.append(original(*by_place, **by_name).transpose(1, 2))
        return rows.scatter(outputs).transpose(1, 2)

    return scan


def _left_out(original: Callable, call: PackedCall, keys: Keys) -> Callable:
    """For fused kernels of a whole mixer: if they return `None`, the mixer computes its steps one by one."""
    return lambda *args, **kwargs: None


_REPLACEMENTS: dict[str, Replace] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _scan_on_rows,
    "mamba2_split_conv1d_scan_combined": _left_out,
    "mamba_inner_fn": _left_out,
}
"""Names under which mixers call functions, each with the function that makes its replacement."""

LEFT_OUT = {name for name, replace in _REPLACEMENTS.items() if replace is _left_out}
"""Fused kernels of a whole mixer, which runs without them."""
_CHUNKED = {name for name, replace in _REPLACEMENTS.items() if replace in (_delta_rule, _state_space)}
_RECURRENCES = _CHUNKED | {name for name, replace in _REPLACEMENTS.items() if replace is _scan_on_rows}
_DECAYS = {"A_log", "dt_bias"}
"""
Parameters that only recurrences have. A recurrence whose forward calls none of `_RECURRENCES` as a global runs on
rows: older mixers keep these functions as attributes, or call them in other methods.
"""
