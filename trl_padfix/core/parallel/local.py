"""
The local tokens of a process in a context-parallel group: how a packed forward runs on a part of its row.

All processes hold the same batch and the same layout. Token-wise layers run on the local tokens of a process. Around
attention a process has its local tokens, `(1, N, t, D)`. It attends with some heads for all tokens (Ulysses), and the
layout stays the same. The channels (or heads) of recurrences and convolutions are independent of each other, too: an
all-to-all gives a process all tokens of some channels, which it computes with the weights of these channels; a second
all-to-all returns the local tokens of all channels. Outputs are all-gathered before the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from .collectives import Group, even_split, exchange


__all__ = ["CONTEXT_PARALLEL", "ContextParallelTokens", "LocalLabels", "tokens_of"]


def tokens_of(layout: Layout, group: Group) -> LocalTokens:
    """
    The tokens of a packed row that this process computes.

    If there are fewer of them than processes, each process computes them all: one without tokens would have nothing to
    exchange.
    """
    return LocalTokens(layout) if layout.packed_tokens < group.size else ContextParallelTokens(layout, group)


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


class ContextParallelTokens(LocalTokens):
    """
    The local tokens of this process: each process of a group has one range of the tokens of a packed row.

    Attributes:
        layout ([`Layout`]): Layout of the full row, `T` tokens.
        group ([`Group`]): The processes, `n` of them.
        tokens_per_rank (`list[int]`): Number of tokens of each process.
        begin (`int`): The first token of this process.

    Example: two processes and a row of five tokens.

    ```python
    >>> import torch
    >>> from trl_padfix import padding_free_layout

    >>> tokens = ContextParallelTokens(padding_free_layout(torch.ones(1, 5)), Group(None, 0, 2))
    >>> tokens.tokens_per_rank
    [3, 2]
    >>> tokens.local(torch.arange(5)), tokens.rank_of(torch.tensor([4, 2])), tokens.local_index(torch.tensor([2]))
    (tensor([0, 1, 2]), tensor([1, 0]), tensor([2]))

    ```
    """

    is_divided = True

    def __init__(self, layout: Layout, group: Group):
        super().__init__(layout)
        self.group, self.tokens_per_rank = group, even_split(layout.packed_tokens, group.size)
        self.begin = sum(self.tokens_per_rank[: group.rank])

    @property
    def count(self) -> int:
        return self.tokens_per_rank[self.group.rank]

    def local(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The values of the local tokens, selected from values for all packed tokens."""
        return x.narrow(dim, self.begin, self.count).contiguous()

    def rank_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rank that computes each of these packed tokens, `(n,)` to `(n,)`."""
        ends = torch.tensor(self.tokens_per_rank, device=tokens.device).cumsum(0)
        return torch.searchsorted(ends, tokens, right=True)

    def local_index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Index among the local tokens of these packed tokens, which must be local."""
        return tokens - self.begin

    def gathered_order(self, ranks: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """How many values each rank has, of values of these `ranks`, and their index after gathering them by rank."""
        # Gathered values are in rank order (a stable sort by rank); the inverse restores their order.
        return ranks.bincount(minlength=self.group.size).tolist(), ranks.argsort(stable=True).argsort()

    def tokens_to_heads(self, states: Sequence[torch.Tensor], heads: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """
        Each of the `states`, `(t, N, ...)` to `(T, n, ...)` in the order of the packed row, in one all-to-all.

        Rank i gets `heads[k][i]` heads of `states[k]`.
        """
        split = [x.split(list(of_ranks), dim=1) for x, of_ranks in zip(states, heads, strict=True)]
        local_heads = [of_ranks[self.group.rank] for of_ranks in heads]
        shapes = [
            [(t, n, *x.shape[2:]) for x, n in zip(states, local_heads, strict=True)] for t in self.tokens_per_rank
        ]
        received = exchange([*zip(*split, strict=True)], shapes, self.group)
        return [torch.cat(x) for x in zip(*received, strict=True)]

    def heads_to_tokens(self, x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """All-to-all from local heads to local tokens, `(T, n, ...)` in the order of the row to `(t, N, ...)`."""
        shapes = [[(self.count, n, *x.shape[2:])] for n in heads]
        received = exchange([[part] for part in x.split(self.tokens_per_rank)], shapes, self.group)
        return torch.cat([part for (part,) in received], dim=1)

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        # Values `(1, T, ...)`, positions `(P, 1, T)` and the features of visual tokens.
        T, local = self.layout.packed_tokens, self.local
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
        # Exchanged tensors have tokens first, attention has heads first.
        states = [x[0].transpose(0, 1) for x in (query, key, value)]
        copies = _copies_of_kv_heads(query.shape[1], key.shape[1], self.group.size)
        states[1:] = [x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in states[1:]]
        heads = [even_split(x.shape[1], self.group.size) for x in states]
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in self.tokens_to_heads(states, heads))
        module, kwargs = _with_local_heads(module, kwargs, query.shape[1] // key.shape[1], self.group)
        output = attend(module, query, key, value, self.layout, kwargs)[0]
        return self.heads_to_tokens(output, heads[0]).unsqueeze(0)

    def mix(self, name: str, run: Callable) -> Callable:
        if (divided := CONTEXT_PARALLEL.get(name)) is None:
            return run

        def run_divided(*args: Any, **kwargs: Any) -> Any:
            call = bind(run, args, kwargs)
            # The all-to-all takes tokens in front, `(t, channels, ...)`.
            states = {k: call[k][0].movedim(divided.token_dim - 1, 0) for k in divided.states}
            channels = max(x.shape[1] for x in states.values())
            if channels < (processes := self.group.size):  # all processes raise the error, so none waits
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
                received = self.tokens_to_heads([states[k] for k in names], [local_channels] * len(names))
                for k, x in zip(names, received, strict=True):
                    call[k] = x.movedim(0, divided.token_dim - 1).unsqueeze(0)
            for k in divided.weights:
                if call.get(k) is not None:
                    call[k] = call[k].split(local_channels)[self.group.rank]
            output = run(**call)
            x = output[0] if isinstance(output, tuple) else output
            x = self.heads_to_tokens(x[0].movedim(divided.token_dim - 1, 0), local_channels)
            x = x.movedim(0, divided.token_dim - 1).unsqueeze(0)
            return (x, None) if isinstance(output, tuple) else x  # delta rules: no final state, as there is no cache

        return run_divided

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather_for_loss(values, self.tokens_per_rank)

    def states_at(self, states: torch.Tensor, index: torch.Tensor, of_all: bool) -> torch.Tensor:
        if of_all:
            ranks = self.rank_of(index)
            local = states.index_select(0, self.local_index(index[ranks == self.group.rank]))
            counts, order = self.gathered_order(ranks)
            return self.group.all_gather_for_loss(local, counts).index_select(0, order)
        # Without a label return any state, as in `padded_output`; it may be filler, which has no index in the batch.
        return states.index_select(0, self.local_index(index)) if len(index) else states[:1]

    def labels(self, index: torch.Tensor, labels: torch.Tensor) -> ScoredLabels:
        return LocalLabels(index, labels, self)


class LocalLabels(ScoredLabels):
    """
    The labels that are predicted from local tokens.

    A process without labels scores one dummy token with the label -100: every process must join the collectives of
    backward.
    """

    def __init__(self, index: torch.Tensor, labels: torch.Tensor, tokens: ContextParallelTokens):
        self.group, self._total = tokens.group, len(labels)
        rank_of_label = tokens.rank_of(tokens.layout.packed_index_of(index))
        self._counts, self._order = tokens.gathered_order(rank_of_label)
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


def _copies_of_kv_heads(heads: int, kv_heads: int, size: int) -> int:
    """
    How often KV heads are repeated, so that each of `size` processes has query heads with their KV heads.

    Example: 8 query heads, 2 KV heads and 4 processes: 2 copies make 4 KV heads, one per process with 2 query heads.

    ```python
    >>> _copies_of_kv_heads(8, 2, 4)
    2

    ```
    """
    for copies in range(1, heads // kv_heads + 1):
        if heads % (kv_heads * copies) == 0 and kv_heads * copies % size == 0:
            return copies
    return heads // kv_heads  # one KV head per query head, whose numbers per process may differ by one
