"""
Context-parallel recurrences and convolutions; see [`ContextParallelLayout`].

Their channels (or heads) are independent of each other. An all-to-all gives a process all tokens of some channels,
which it computes with the weights of these channels; a second all-to-all returns the local tokens of all channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import PaddingRemovalError
from .collectives import even_split
from .layout import ContextParallelLayout


__all__ = ["CONTEXT_PARALLEL", "with_context_parallel"]


def with_context_parallel(name: str, run: Callable, cp_layout: ContextParallelLayout | None) -> Callable:
    """`run`, which replaces the function `name` of a mixer, for local tokens; unchanged without `cp_layout`."""
    return run if cp_layout is None or name not in CONTEXT_PARALLEL else CONTEXT_PARALLEL[name](run, cp_layout)


def _convolution(run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        channels = _split_evenly(len(weight), cp_layout)
        # `(1, C, t)` to `(t, C)` and back: the all-to-all takes tokens in front.
        (x,) = cp_layout.tokens_to_heads([hidden_states[0].transpose(0, 1)], [channels])
        x = x.transpose(0, 1).unsqueeze(0)
        weights = (_local_weight(weight, channels, cp_layout), _local_weight(bias, channels, cp_layout))
        x = run(x, *weights, activation=activation, **kwargs)
        return cp_layout.heads_to_tokens(x[0].transpose(0, 1), channels).transpose(0, 1).unsqueeze(0)

    return causal_conv1d_fn


def _delta_rule(run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    def chunk(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        heads = _split_evenly(value.shape[2], cp_layout)
        # Queries and keys of a group are repeated first, so that heads can be divided at any number.
        states = [_for_each_head(x, value.shape[2]) for x in (query, key, value, g, beta)]
        # Decays may be in float32 and states in half precision: one all-to-all for each.
        states = [
            x.unsqueeze(0)
            for some in (states[:3], states[3:])
            for x in cp_layout.tokens_to_heads([x[0] for x in some], [heads] * len(some))
        ]
        output = run(*states, **kwargs)[0]
        return cp_layout.heads_to_tokens(output[0], heads).unsqueeze(0), None  # no final state: there is no cache

    return chunk


def _state_space(run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    def scan(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        heads = _split_evenly(x.shape[2], cp_layout)
        states = [x, *(_for_each_head(s, x.shape[2]) for s in (B, C))]
        x, B, C = (s.unsqueeze(0) for s in cp_layout.tokens_to_heads([s[0] for s in states], [heads] * 3))
        dt = cp_layout.tokens_to_heads([dt[0]], [heads])[0].unsqueeze(0)
        # One value per head; activations have been exchanged, weights are only cut.
        local_A, local_D, local_bias = (_local_weight(w, heads, cp_layout) for w in (A, D, dt_bias))
        output = run(x, dt, local_A, B, C, chunk_size=chunk_size, D=local_D, dt_bias=local_bias, **kwargs)
        return cp_layout.heads_to_tokens(output[0], heads).unsqueeze(0)

    return scan


def _split_evenly(channels: int, cp_layout: ContextParallelLayout) -> list[int]:
    """
    Number of heads or channels of each process.

    Raises:
        PaddingRemovalError: If there are fewer than processes. All processes raise it, so none waits for another.
    """
    n = cp_layout.group.size
    if channels < n:
        raise PaddingRemovalError(
            f"A recurrence with {channels} heads (or channels) cannot be shared by {n} processes. Take fewer of them "
            "(`cp_size`)."
        )
    return even_split(channels, n)


def _for_each_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat groups for their heads, `(1, t, groups, ...)` to `(1, t, heads, ...)`."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _local_weight(
    weight: torch.Tensor | None, channels: list[int], cp_layout: ContextParallelLayout
) -> torch.Tensor | None:
    return None if weight is None else weight.split(channels)[cp_layout.group.rank]


CONTEXT_PARALLEL: dict[str, Callable[[Callable, ContextParallelLayout], Callable]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
}
"""Functions with independent channels, by the names under which mixers call them."""
