"""
The tokens of a packed row that this process computes.

[`LocalTokens`] holds all of them. Where several processes compute one row, `parallel/local.py` has a subclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layout.layout import Layout
from ..layout.shared_prefixes import PrefixedLayout
from .prefix_states import ForwardStates


if TYPE_CHECKING:
    from ..parallel.collectives import Exchange


__all__ = ["LocalTokens", "ScoredLabels"]


class LocalTokens:
    """
    The packed tokens that this process computes, `t` of the `T` tokens of a layout: here all of them.

    Attributes:
        layout ([`Layout`]): Layout of the full row.
        is_divided (`bool`): Whether other processes compute the other tokens.
        exchange ([`Exchange`], *optional*): The communication around a compiled layer's attention.
    """

    is_divided = False

    def __init__(self, layout: Layout):
        self.layout = layout

    @property
    def exchange(self) -> Exchange | None:
        return None

    @property
    def count(self) -> int:
        """Number of local tokens, `t`."""
        return self.layout.packed_tokens

    @property
    def mixed(self) -> LocalTokens:
        """The tokens that mixers get: if each process has whole rows, the tokens of its rows, without an exchange."""
        return self

    @property
    def new(self) -> LocalTokens | None:
        """The tokens after shared prefixes; `None` if the layout has no shared prefixes, or no new tokens."""
        assert isinstance(self.layout, PrefixedLayout)
        return None if self.layout.new is None else LocalTokens(self.layout.new)

    def select(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a decoder for the local tokens, selected from those for all packed tokens."""
        return arguments

    def attend(
        self, attend: Callable[..., torch.Tensor], module: nn.Module, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        """Attention `attend(module, query, key, value, layout, kwargs)` of the local tokens, `(1, t, N, D)`."""
        return attend(module, query, key, value, self.layout, kwargs)

    def mix(self, name: str, run: Callable) -> Callable:
        """`run`, which replaces the function `name` of a recurrence or convolution, for the local tokens."""
        return run

    def record(self, states: ForwardStates) -> None:
        """Record in the states of a prefix which process computes which of its tokens."""

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """The values of all packed tokens, `(t, ...)` to `(T, ...)`."""
        return values

    def states_at(self, states: torch.Tensor, index: torch.Tensor, of_all: bool) -> torch.Tensor:
        """The states `(t, H)` of the packed tokens `index`: `of_all` processes, or of this one alone."""
        return states.index_select(0, index)

    def labels(self, index: torch.Tensor, labels: torch.Tensor) -> ScoredLabels:
        """The labels that this process scores, of all `labels`; `index` locates their states in the batch."""
        return ScoredLabels(index, labels)


class ScoredLabels:
    """The labels that this process scores, `(n,)`, and the indices in the flattened batch of their states."""

    def __init__(self, index: torch.Tensor, labels: torch.Tensor):
        self.index, self.labels = index, labels

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all labels, in their order, gathered from the values of each process's labels."""
        return values

    def complete_loss(self, model: PreTrainedModel, output: Any, num_items: torch.Tensor | int | None) -> None:
        """Replace the loss of the local labels in the output of a model by the loss of all labels."""
