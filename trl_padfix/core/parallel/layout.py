"""
A packed row divided among the processes of a context-parallel group.

All processes hold the same batch and the same layout. Token-wise layers run on the local tokens of a process. Mixers
need all tokens and communicate (see [`ContextParallelLayout`]). Outputs are all-gathered before the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..layout.layout import Layout
from .collectives import Group, even_split, exchange


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
        shapes = [[(self.local_tokens, n, *x.shape[2:])] for n in heads]
        received = exchange([[part] for part in x.split(list(self.tokens_per_rank))], shapes, self.group)
        return torch.cat([part for (part,) in received], dim=1)

    def around(self, attend: Callable[..., torch.Tensor], states: list[torch.Tensor]) -> torch.Tensor:
        """
        Attention `attend(query, key, value)` for the `states` of the local tokens, with the communication around it.

        Queries, keys and values are `(t, N, D)`; `attend` gets them for all tokens with the local heads.
        """
        processes = self.group.size
        query, *kv = states
        copies = _copies_of_kv_heads(query.shape[1], kv[0].shape[1], processes)
        if copies > 1:
            kv = [x.repeat_interleave(copies, dim=1) for x in kv]
        states = [query, *kv]
        heads = [even_split(x.shape[1], processes) for x in states]
        return self.heads_to_tokens(attend(*self.tokens_to_heads(states, heads)), heads[0])

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
        order = ranks.argsort(stable=True).argsort()
        return self.group.all_gather_for_loss(local, counts).index_select(0, order)


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
