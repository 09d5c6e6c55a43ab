"""
The functions with which linear attention, state-space scans and short convolutions look at other tokens.

A mixer of these kinds stays packed: its projections, norms and gates compute each token by itself. Only the functions
that it calls by these names are replaced, and only for this mixer: it runs with a copy of its forward that has globals
of its own. The replacements call the very functions that the model would have called, on the segments of the layout:

- a convolution on all segments at once, each led by the few tokens before it on its path;
- a recurrence on the nodes of the tree, level by level, each node from the final state of its parent; with the
  variable-length kernel of a package, where one is installed whose states carry gradients;
- a scan whose state carries no gradient on rows.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count, repeat
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from ..attention.attention import uses_attention_interface
from ..call.calls import LAYOUT, PackedCall, packed_call
from ..context import within
from ..errors import PaddingRemovalError
from ..model.masks import PackedMask
from ..model.patching import ForwardPatch
from ..model.views import viewed_module
from ..parallel.mixers import with_context_parallel
from .forks import tree_of
from .row_buckets import row_buckets


__all__ = ["LEFT_OUT", "PrimitivesPatch", "chunk_of", "hands_states_on", "kernel_parameters", "primitives_of"]

CHUNK = 64
"""Tokens of a chunk of flash-linear-attention's kernels, which take no other number."""

Keys = Iterator[tuple[nn.Module, int]]
"""A name for each call of a function in a mixer, the same in all its forwards: states are handed on by it."""


def primitives_of(module: nn.Module) -> set[str]:
    """Names of the functions through which `module` looks at other tokens; none if it does so in other ways too."""
    forward = inspect.unwrap(type(module).forward)
    loaded = {i.argval for i in dis.get_instructions(forward) if i.opname == "LOAD_GLOBAL"}
    names = _KNOWN.keys() & loaded & forward.__globals__.keys()
    by_attention = uses_attention_interface(module) or "attention_interface" in forward.__code__.co_varnames
    convolves = any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())
    recurs = any(name in _DECAYS for name, _ in module.named_parameters(recurse=False))
    by_itself = (convolves and "causal_conv1d_fn" not in names) or (recurs and not names & _RECURRENCES)
    return set() if by_attention or by_itself else names


def hands_states_on(module: nn.Module) -> bool:
    """Whether a forked mixer can begin with the states in which other forwards have ended, and gradients go back."""
    return all(_KNOWN[name] is not _scan_on_rows for name in primitives_of(module))


def chunk_of(module: nn.Module) -> int:
    """Tokens that the recurrence of a forked mixer computes at once; 0 if it has none that works by chunks."""
    known = getattr(module, "chunk_size", None)
    space = inspect.unwrap(type(module).forward).__globals__
    for name in primitives_of(module) & _BY_CHUNKS:
        default = _parameters(space[name]).get("chunk_size")
        known = known or (default.default if default is not None else None)
        return known if isinstance(known, int) else CHUNK
    return 0


class PrimitivesPatch(ForwardPatch):
    """Runs a mixer whose functions keep the segments of the packed row apart."""

    serves_recomputation = runs_on_view = True

    def __init__(self, module: nn.Module, attachment: Any):
        super().__init__(module, attachment)
        for name in primitives_of(module) & _BY_CHUNKS:  # before the first step, if one cannot be read
            kernel_parameters(inspect.unwrap(type(module).forward).__globals__[name])

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = kwargs.pop(LAYOUT, None) or packed_call(self.attachment.decoder)
        if call is None:
            return self.wrapped(*args, **kwargs)
        kwargs = {k: None if isinstance(v, PackedMask) else v for k, v in kwargs.items()}
        forward: Any = self.on_view()
        function = getattr(forward, "__func__", None)
        assert function is not None, "a mixer whose forward is not a method of its class is handed rows"
        space = inspect.unwrap(function).__globals__
        names = primitives_of(viewed_module(self.module))
        keys = zip(repeat(self.module), count())
        replaced = {
            name: with_context_parallel(name, _KNOWN[name](space[name], call, keys), call.cp_layout) for name in names
        }
        with within(packed=call):
            return _with_globals(function, replaced)(forward.__self__, *args, **kwargs)


def _with_globals(function: Callable, replaced: dict[str, Any]) -> Callable:
    """A copy of `function`, and of what it wraps, in which the globals `replaced` have other values."""
    inner = getattr(function, "__wrapped__", None)
    space, closure = function.__globals__, function.__closure__
    if inner is None:
        space = {**space, **replaced}
    else:
        copied = _with_globals(inner, replaced)
        closure = tuple(CellType(copied) if _holds(cell, inner) else cell for cell in closure or ())
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def _convolution(own: Callable, call: PackedCall, keys: Keys) -> Callable:
    tree = tree_of(call)

    def causal_conv1d_fn(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            return own(x, weight, bias, activation=activation)

        return tree.convolve(run, hidden_states, weight.shape[-1] - 1, next(keys))

    return causal_conv1d_fn


def _delta_rule(own: Callable, call: PackedCall, keys: Keys) -> Callable:
    tree, is_varlen = tree_of(call), "cu_seqlens" in kernel_parameters(own)

    def chunk(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        kept = {k: v for k, v in kwargs.items() if k in ("use_qk_l2norm_in_kernel", "chunk_size", "scale")}

        def step(parts: list[torch.Tensor], initial: Any, with_states: bool, bounds: Any = None) -> Any:
            # Beyond its end a node does not decay (g = 0) and does not write (beta = 0). q, k and v go by position:
            # kernels have other names for them.
            q, k, v, decay, write = parts
            given = {"initial_state": initial, "output_final_state": with_states, **kept}
            if bounds is not None:
                given["cu_seqlens"] = bounds
            return own(q, k, v, g=decay, beta=write, **given)

        over = tree.over_levels if is_varlen else tree.over_blocks
        return over(step, [query, key, value, g, beta], next(keys)), None

    return chunk


def _state_space(own: Callable, call: PackedCall, keys: Keys) -> Callable:
    known = kernel_parameters(own)
    tree, is_kernel, separates = tree_of(call), bool(known), "seq_idx" in known

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: Any = None,
        dt_bias: Any = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> torch.Tensor:
        # Step sizes are made here, so that beyond the end of a node they are zero: no decay, no input.
        if is_kernel:
            dt = dt.float()  # as kernels do within; the function in torch adds the bias in the model's precision
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = nn.functional.softplus(dt)
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
        if separates and tree.is_flat:
            return own(hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, seq_idx=tree.node_of)

        def step(parts: list[torch.Tensor], initial: Any, with_states: bool) -> Any:
            x, steps, b, c = parts
            given = {"initial_states": initial, "return_final_states": with_states}
            output = own(x, steps, A, b, c, chunk_size=chunk_size, D=D, **given)
            return output if with_states else (output, None)

        return tree.over_blocks(step, [hidden_states, dt, B, C], next(keys))

    return scan


def _scan_on_rows(own: Callable, call: PackedCall, keys: Keys) -> Callable:
    """A scan on rows, where its arguments and its output hold tokens in their last dimension."""
    rows, parameters = row_buckets(call), list(_parameters(own))

    def of_rows(name: str, value: Any, block: int) -> Any:
        if name not in ("hidden_states", "dt", "B", "C", "z") or value is None:
            return value
        return rows.gather(value.transpose(1, 2), block).transpose(1, 2)

    def scan(*args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = []
        for block in range(len(rows.tokens)):
            positional = [of_rows(name, value, block) for name, value in zip(parameters, args, strict=False)]
            named = {name: of_rows(name, value, block) for name, value in kwargs.items()}
            outputs.append(own(*positional, **named).transpose(1, 2))
        return rows.scatter(outputs).transpose(1, 2)

    return scan


def _left_out(own: Callable, call: PackedCall, keys: Keys) -> Callable:
    """For fused kernels of a whole mixer: without one the mixer computes its steps one by one."""
    return lambda *args, **kwargs: None


def _parameters(own: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters with which a mixer calls a function of transformers: those of its version in torch."""
    if isinstance(own, nn.Module):
        return dict([*inspect.signature(type(own).forward).parameters.items()][1:])  # without `self`
    return inspect.signature(own).parameters


def kernel_parameters(own: Any) -> frozenset[str]:
    """
    Parameters of the kernel behind a function of transformers; none where the function is its own, in torch.

    Where the package `kernels` is installed, such a function is a module whose forward calls it. `kernelize` puts a
    kernel of the Hub into that module at any time, so only what is read from functions is kept.

    Raises:
        PaddingRemovalError: If they cannot be read: without them nobody knows whether the kernel keeps rows apart.
    """
    if not isinstance(own, nn.Module):
        return _of_function(own)
    forward = inspect.unwrap(getattr(own.forward, "__func__", own.forward))
    behind = inspect.getclosurevars(forward).nonlocals.get("func") if inspect.isfunction(forward) else None
    return _of_function(behind or own.forward)


@cache
def _of_function(function: Any) -> frozenset[str]:
    inner = function
    while inspect.isfunction(inner):
        closure = inspect.getclosurevars(inner).nonlocals
        if "is_new_implementation" in closure:
            return frozenset(closure["applicable_params"] if closure["is_new_implementation"] else ())
        following = getattr(inner, "__wrapped__", None)
        if following is None:
            break
        inner = following
    if inspect.isfunction(inner) and inner.__module__.startswith("transformers"):
        return frozenset()
    code = getattr(inspect.unwrap(function), "__code__", None)  # no signature: one may be claimed of what it calls
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if set(names) <= {"self"}:
        raise PaddingRemovalError(
            f"The arguments of {function!r} cannot be read, so nobody knows whether it keeps packed rows apart. Set "
            "`use_kernels=False` (or the environment's USE_HUB_KERNELS=NO), or train with `padding_free=False`."
        )
    return frozenset(names)


_KNOWN: dict[str, Callable[[Callable, PackedCall, Keys], Callable]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _scan_on_rows,
    "mamba2_split_conv1d_scan_combined": _left_out,
    "mamba_inner_fn": _left_out,
}
"""What stands for each function, by the name under which mixers call it."""

_BY_CHUNKS = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}
LEFT_OUT = {name for name, replacement in _KNOWN.items() if replacement is _left_out}
"""Fused kernels of a whole mixer, which runs without them."""
_RECURRENCES = _KNOWN.keys() - {"causal_conv1d_fn", *LEFT_OUT}
_DECAYS = {"A_log", "dt_bias"}
"""Parameters of a recurrence. Older mixers keep their functions as attributes, or call methods that hold them: such a
mixer is handed rows."""
