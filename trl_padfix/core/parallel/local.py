"""
The local tokens of a process in a context-parallel group: how a packed forward runs on a part of its row.

Around attention a process has its local tokens, `(1, N, t, D)`. It attends with some heads for all tokens (Ulysses),
and the layout stays the same. The channels (or heads) of recurrences and convolutions are independent of each other,
too: an all-to-all gives a process all tokens of some channels, which it computes with the weights of these channels; a
second all-to-all returns the local tokens of all channels. See [`ContextParallelLayout`].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from ..call.arguments import feature_index, visual_mask
from ..call.calls import LocalTokens, ScoredLabels
from ..errors import PaddingRemovalError
from ..layout.layout import Layout
from ..model.inspection import bind
from ..model.views import view_of
from .collectives import Group, even_split
from .layout import ContextParallelLayout


__all__ = [
    "CONTEXT_PARALLEL", "ContextParallelTokens", "LocalLabels", "tokens_of", "with_context_parallel",
]  # fmt: skip


def tokens_of(layout: Layout, group: Group) -> LocalTokens:
    """
    The tokens of a packed row that this process computes.

    If there are fewer of them than processes, each process computes them all: one without tokens would have nothing to
    exchange.
    """
    if layout.packed_tokens < group.size:
        return LocalTokens(layout)
    return ContextParallelTokens(ContextParallelLayout(layout, group))


class ContextParallelTokens(LocalTokens):
    """The local tokens of this process, where a [`ContextParallelLayout`] divides a packed row among processes."""

    is_divided = True

    def __init__(self, cp_layout: ContextParallelLayout):
        super().__init__(cp_layout.layout)
        self.cp_layout = cp_layout

    @property
    def count(self) -> int:
        return self.cp_layout.local_tokens

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        # Values `(1, T, ...)`, positions `(P, 1, T)` and the features of visual tokens.
        T, local = self.layout.packed_tokens, self.cp_layout.local
        features = feature_index(visual_mask(arguments, (1, T)), partial(local, dim=1))

        def select(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.dim() < 2:
                return x
            if tuple(x.shape[:2]) == (1, T):
                return local(x, dim=1)
            if tuple(x.shape[1:]) == (1, T):
                return local(x, dim=2)
            return x if features is None or len(x) != features[0] else x.index_select(0, features[1])

        return tree_map(select, arguments)

    def attend(
        self, attend: Callable[..., torch.Tensor], module: nn.Module, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        cp_layout = self.cp_layout

        def attend_received(*received: torch.Tensor) -> torch.Tensor:
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in received)
            kv_groups = query.shape[1] // key.shape[1]
            local_module, local_kwargs = _with_local_heads(module, kwargs, kv_groups, cp_layout.group)
            return attend(local_module, query, key, value, cp_layout.layout, local_kwargs)[0]

        # Exchanged tensors have tokens first, attention has heads first.
        states = [x[0].transpose(0, 1) for x in (query, key, value)]
        return cp_layout.around(attend_received, states).unsqueeze(0)

    def mix(self, name: str, run: Callable) -> Callable:
        return with_context_parallel(name, run, self.cp_layout)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return self.cp_layout.all_gather_for_loss(values)

    def states_at(self, states: torch.Tensor, index: torch.Tensor, of_all: bool) -> torch.Tensor:
        if of_all:
            return self.cp_layout.all_gather_at(states, index)
        # Without a label return any state, as in `padded_output`; it may be filler, which has no index in the batch.
        return states.index_select(0, self.cp_layout.local_index(index)) if len(index) else states[:1]

    def labels(self, index: torch.Tensor, labels: torch.Tensor) -> ScoredLabels:
        return LocalLabels(index, labels, self.cp_layout)


class LocalLabels(ScoredLabels):
    """
    The labels that are predicted from local tokens.

    A process without labels scores one dummy token with the label -100: every process must join the collectives of
    backward.
    """

    def __init__(self, index: torch.Tensor, labels: torch.Tensor, cp_layout: ContextParallelLayout):
        self.group, self._total = cp_layout.group, len(labels)
        rank_of_label = cp_layout.rank_of(cp_layout.layout.packed_index_of(index))
        # Gathered values are in rank order: the inverse of the stable sort by rank restores the order of the labels.
        self._order = rank_of_label.argsort(stable=True).argsort()
        self._counts = rank_of_label.bincount(minlength=self.group.size).tolist()
        is_local = rank_of_label == self.group.rank
        super().__init__(index[is_local], labels[is_local])
        if not self._counts[self.group.rank]:  # the decoder then returns some state of this process
            self.labels = labels.new_full((1,), -100)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        local = values[: self._counts[self.group.rank]]  # drops the value of a dummy token
        local = local.byte() if local.dtype == torch.bool else local  # collectives of gloo take no booleans
        return self.group.all_gather_for_loss(local, self._counts).index_select(0, self._order).to(values.dtype)

    def complete_loss(self, model: PreTrainedModel, output: Any, num_items: torch.Tensor | int | None) -> None:
        if output.get("loss") is None:
            return
        loss = -output["log_probs"].sum() / (self._total if num_items is None else num_items)
        if output.get("aux_loss") is not None:
            loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * output["aux_loss"]
        output["loss"] = loss


def _with_local_heads(
    module: nn.Module, kwargs: dict[str, Any], kv_groups: int, group: Group
) -> tuple[nn.Module, dict[str, Any]]:
    """
    An attention module and its arguments, for the local heads.

    Attention functions read the sinks and the size of a group of heads from the module: they must be the local ones.
    """
    local: dict[str, Any] = {"num_key_value_groups": kv_groups}
    if (sinks := kwargs.get("s_aux")) is not None:
        local["sinks"] = sinks.split(even_split(len(sinks), group.size))[group.rank]
        kwargs = kwargs | {"s_aux": local["sinks"]}
    overrides = {name: value for name, value in local.items() if hasattr(module, name)}
    # With the config of the module: by default a view gets one that names packed attention.
    return view_of(module, {"config": module.config, **overrides}), kwargs


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
    if (divided := CONTEXT_PARALLEL.get(name)) is None:
        return run

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
