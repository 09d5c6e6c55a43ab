"""
Recurrences and convolutions of which each process of a group computes a part; see [`ContextParallelLayout`].

Their channels do not look at each other: a process is given all tokens of some channels, with the weights that belong
to these, and gives the tokens back. Everything around them is computed token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import PaddingRemovalError
from .collectives import even
from .layout import ContextParallelLayout


__all__ = ["CONTEXT_PARALLEL", "with_context_parallel"]


def with_context_parallel(name: str, run: Callable, cp_layout: ContextParallelLayout | None) -> Callable:
    """`run`, which stands for the function `name` of a mixer, for the tokens of this process."""
    return run if cp_layout is None or name not in CONTEXT_PARALLEL else CONTEXT_PARALLEL[name](run, cp_layout)


def _convolution(run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        channels = _dealt(len(weight), cp_layout)
        x = cp_layout.to_heads(hidden_states[0].transpose(0, 1), channels).transpose(0, 1).unsqueeze(0)
        own = (_own(weight, channels, cp_layout), _own(bias, channels, cp_layout))
        x = run(x, *own, activation=activation, **kwargs)
        return cp_layout.to_tokens(x[0].transpose(0, 1), channels).transpose(0, 1).unsqueeze(0)

    return causal_conv1d_fn


def _delta_rule(run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    def chunk(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        heads = _dealt(value.shape[2], cp_layout)
        states = [_for_each_head(x, value.shape[2]) for x in (query, key, value, g, beta)]
        output = run(*(cp_layout.to_heads(x[0], heads).unsqueeze(0) for x in states), **kwargs)[0]
        return cp_layout.to_tokens(output[0], heads).unsqueeze(0), None

    return chunk


def _state_space(run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    def scan(
        x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, dt_bias: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        heads = _dealt(x.shape[2], cp_layout)
        states = [x, dt, *(_for_each_head(s, x.shape[2]) for s in (B, C))]
        x, dt, B, C = (cp_layout.to_heads(s[0], heads).unsqueeze(0) for s in states)
        A, D, dt_bias = (_own(w, heads, cp_layout) for w in (A, D, dt_bias))
        output = run(x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, **kwargs)
        return cp_layout.to_tokens(output[0], heads).unsqueeze(0)

    return scan


def _dealt(channels: int, cp_layout: ContextParallelLayout) -> list[int]:
    """
    How many heads or channels each process is given.

    Raises:
        PaddingRemovalError: If there is not one for each; on every process alike.
    """
    n = cp_layout.group.size
    if channels < n:
        raise PaddingRemovalError(
            f"A recurrence with {channels} heads (or channels) cannot be shared by {n} processes. Take fewer of them "
            "(`cp_size`)."
        )
    return even(channels, n)


def _for_each_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`(1, t, groups, ...)` to `(1, t, heads, ...)`: groups are shared by as many heads each."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _own(weight: torch.Tensor | None, channels: list[int], cp_layout: ContextParallelLayout) -> torch.Tensor | None:
    return None if weight is None else weight.split(channels)[cp_layout.group.rank]


CONTEXT_PARALLEL: dict[str, Callable[[Callable, ContextParallelLayout], Callable]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""The functions that run on some channels, by the names under which mixers call them."""
