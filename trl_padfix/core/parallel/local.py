"""The local tokens of a process in a context-parallel group: how a packed forward runs on a part of its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from ..call.arguments import feature_index, visual_mask
from ..call.calls import LocalTokens, ScoredLabels
from ..call.prefix_states import ForwardStates
from ..layout.flat_maps import inverse_permutation
from ..layout.layout import Layout
from ..layout.shared_prefixes import PrefixedLayout
from .attention import attend_context_parallel
from .collectives import Exchange, Group
from .layout import ContextParallelLayout
from .mixers import with_context_parallel


__all__ = ["ContextParallelGroup", "ContextParallelTokens", "LocalLabels"]


@dataclass(frozen=True)
class ContextParallelGroup(Group):
    """Processes that compute one packed row, each its local tokens."""

    def tokens_of(self, layout: Layout) -> LocalTokens:
        """The tokens of a packed row that this process computes."""
        cp_layout = ContextParallelLayout.over(layout, self)
        return LocalTokens(layout) if cp_layout is None else ContextParallelTokens(cp_layout)

    def lacks_tokens(self, layout: PrefixedLayout) -> bool:
        """Whether some process has no token of a forward, new or of a prefix."""
        if layout.new is not None:
            return layout.new.packed_tokens < self.size
        assert layout.prefix_states is not None  # the schedule of a step sets them before each forward
        reads = layout.prefix_states.reads
        return not all(any(states.ranges[rank] for states in reads) for rank in range(self.size))


class ContextParallelTokens(LocalTokens):
    """The local tokens of this process, where a [`ContextParallelLayout`] divides a packed row among processes."""

    is_divided = True

    def __init__(self, cp_layout: ContextParallelLayout):
        super().__init__(cp_layout.layout)
        self.cp_layout = cp_layout

    @property
    def count(self) -> int:
        return self.cp_layout.local_tokens

    @property
    def mixed(self) -> LocalTokens:
        return self._of_rows if self.cp_layout.whole_rows else self

    @cached_property
    def _of_rows(self) -> LocalTokens:
        return LocalTokens(self.cp_layout.local_layout)

    @property
    def exchange(self) -> Exchange:
        return self.cp_layout.exchange

    @property
    def new(self) -> LocalTokens | None:
        return None if self.cp_layout.new is None else ContextParallelTokens(self.cp_layout.new)

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
        if self.cp_layout.whole_rows:  # all keys of the local queries are local
            return self.mixed.attend(attend, module, query, key, value, kwargs)
        return attend_context_parallel(attend, module, query, key, value, self.cp_layout, kwargs)

    def mix(self, name: str, run: Callable) -> Callable:
        return with_context_parallel(name, run, self.cp_layout)

    def record(self, states: ForwardStates) -> None:
        states.divide(self.cp_layout.ranges, self.cp_layout.group.rank)

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
        self._order = inverse_permutation(rank_of_label.argsort(stable=True))
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
