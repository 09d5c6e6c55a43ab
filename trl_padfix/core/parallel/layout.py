"""
A packed row divided among the processes of a context-parallel group.

All processes hold the same batch and the same layout. Token-wise layers run on the local tokens of a process. Mixers
need all tokens and communicate (see [`ContextParallelLayout`]). Outputs are all-gathered before the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..layout.layout import Layout, inverse_permutation
from .collectives import Exchange, Group, even_split


__all__ = ["ContextParallelLayout"]


@dataclass(frozen=True, eq=False)
class ContextParallelLayout:
    """
    The packed row of a layout, divided among the processes of a group: each has one range of its tokens.

    Attributes:
        layout ([`Layout`]):
            Layout of the full row, `T` tokens.
        group ([`Group`]):
            The processes, `n` of them.

    Example: two processes and a row of five tokens.

    ```python
    >>> import torch
    >>> from trl_padfix import padding_free_layout

    >>> layout = padding_free_layout(torch.ones(1, 5))
    >>> cp = ContextParallelLayout(layout, Group(None, 0, 2))
    >>> cp.tokens_per_rank
    [3, 2]
    >>> cp.local(torch.arange(5)), cp.rank_of(torch.tensor([4, 2])), cp.local_index(torch.tensor([2]))
    (tensor([0, 1, 2]), tensor([1, 0]), tensor([2]))

    ```
    """

    layout: Layout
    group: Group

    @cached_property
    def tokens_per_rank(self) -> list[int]:
        """Number of tokens of each process."""
        return even_split(self.layout.packed_tokens, self.group.size)

    @property
    def local_tokens(self) -> int:
        """Number of tokens of this process, `t`."""
        return self.tokens_per_rank[self.group.rank]

    @property
    def begin(self) -> int:
        """The first token of this process."""
        return sum(self.tokens_per_rank[: self.group.rank])

    def local(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The values of the local tokens, selected from values for all packed tokens."""
        return x.narrow(dim, self.begin, self.local_tokens).contiguous()

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of local tokens with the other processes."""
        from .operators import all_to_all_of  # registers an operator with torch

        return Exchange(self.group.rank, tuple(self.tokens_per_rank), all_to_all_of(self.group.group))

    def all_gather_for_loss(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather before the loss, `(t, ...)` to `(T, ...)`."""
        return self.group.all_gather_for_loss(x, self.tokens_per_rank)

    def rank_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rank that computes each of these packed tokens, `(n,)` to `(n,)`."""
        ends = torch.tensor(self.tokens_per_rank, device=tokens.device).cumsum(0)
        return torch.searchsorted(ends, tokens, right=True)

    def local_index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Index among the local tokens of these packed tokens, which must be local."""
        return tokens - self.begin

    def all_gather_at(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """All-gather before the loss, only the values of these packed `tokens`: `(t, ...)` to `(n, ...)`."""
        ranks = self.rank_of(tokens)
        local = x.index_select(0, self.local_index(tokens[ranks == self.group.rank]))
        counts = ranks.bincount(minlength=self.group.size).tolist()
        # Gathered values are in rank order (a stable sort by rank); the inverse restores the order of `tokens`.
        order = inverse_permutation(ranks.argsort(stable=True))
        return self.group.all_gather_for_loss(local, counts).index_select(0, order)
