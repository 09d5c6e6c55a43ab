"""
Context-parallel recurrences and convolutions; see [`ContextParallelLayout`].

Their channels (or heads) are independent of each other. An all-to-all gives a process all tokens of some channels,
which it computes with the weights of these channels; a second all-to-all returns the local tokens of all channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import PaddingRemovalError
from ..model.inspection import bind
from .collectives import even_split
from .layout import ContextParallelLayout


__all__ = ["CONTEXT_PARALLEL", "with_context_parallel"]


class Divided(NamedTuple):
    """
    The arguments of a function whose channels are divided among processes.

    Attributes:
        states (`tuple[str, ...]`): Arguments with a value for each token and channel, `(1, t, channels, ...)`.
        weights (`tuple[str, ...]`): Arguments with a value for each channel; they may be `None`.
        token_dim (`int`): Dimension of the tokens in states and output: 2 for `(1, channels, t)`.
    """

    states: tuple[str, ...]
    weights: tuple[str, ...] = ()
    token_dim: int = 1


_DELTA_RULE = Divided(states=("query", "key", "value", "g", "beta"))

CONTEXT_PARALLEL = {
    "causal_conv1d_fn": Divided(states=("hidden_states",), weights=("weight", "bias"), token_dim=2),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Divided(states=("hidden_states", "dt", "B", "C"), weights=("A", "D", "dt_bias")),
}
"""Functions with independent channels, by the names under which mixers call them."""


def with_context_parallel(name: str, run: Callable, cp_layout: ContextParallelLayout) -> Callable:
    """`run`, which replaces the function `name` of a mixer, for local tokens."""
    if name not in CONTEXT_PARALLEL:
        return run
    divided = CONTEXT_PARALLEL[name]

    def run_divided(*args: Any, **kwargs: Any) -> Any:
        call = bind(run, args, kwargs)
        # The all-to-all takes tokens in front, `(t, channels, ...)`.
        states = {k: call[k][0].movedim(divided.token_dim - 1, 0) for k in divided.states}
        channels = max(x.shape[1] for x in states.values())
        if channels < (processes := cp_layout.group.size):  # all processes raise the error, so none waits
            raise PaddingRemovalError(
                f"A recurrence with {channels} heads (or channels) cannot be shared by {processes} processes. Use "
                "fewer processes (`cp_size`)."
            )
        local_channels = even_split(channels, processes)
        for k, x in states.items():
            if x.shape[1] < channels:  # one value per group of heads: repeated, so that a group can be divided
                states[k] = x.repeat_interleave(channels // x.shape[1], dim=1)
        # Decays may be in float32 and states in half precision: one all-to-all for each dtype.
        for dtype in dict.fromkeys(x.dtype for x in states.values()):
            names = [k for k, x in states.items() if x.dtype == dtype]
            received = cp_layout.tokens_to_heads([states[k] for k in names], [local_channels] * len(names))
            for k, x in zip(names, received, strict=True):
                call[k] = x.movedim(0, divided.token_dim - 1).unsqueeze(0)
        for k in divided.weights:
            if call.get(k) is not None:
                call[k] = call[k].split(local_channels)[cp_layout.group.rank]
        output = run(**call)
        x = output[0] if isinstance(output, tuple) else output
        x = cp_layout.heads_to_tokens(x[0].movedim(divided.token_dim - 1, 0), local_channels)
        x = x.movedim(0, divided.token_dim - 1).unsqueeze(0)
        return (x, None) if isinstance(output, tuple) else x  # delta rules: no final state, as there is no cache

    return run_divided
