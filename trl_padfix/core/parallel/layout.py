"""
A packed row divided among the processes of a context-parallel group.

All processes hold the same batch and the same layout. Token-wise layers run on the local tokens of a process. Mixers
need all tokens and communicate (see [`ContextParallelLayout`]). Outputs are all-gathered before the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..layout.layout import Layout, inverse_permutation
from ..layout.shared_prefixes import PrefixedLayout
from .collectives import Exchange, Group, even_split


__all__ = ["ContextParallelLayout", "ranges_of_rows"]

MAX_SHARE = 1.1
"""Maximum number of tokens of a process, relative to an equal share; with more, rows are cut instead."""


@dataclass(frozen=True, eq=False)
class ContextParallelLayout:
    """
    The packed row of a layout, divided among the processes of a group.

    Attributes:
        layout ([`Layout`]):
            Layout of the full row, `T` tokens.
        group ([`Group`]):
            The processes, `n` of them.
        whole_rows (`bool`, *optional*, defaults to `False`):
            Whether each process has whole rows, with the prefixes that they share: attention exchanges nothing. By
            default the row is cut, and an all-to-all gives each process all tokens of some heads (Ulysses).
        parts (`tuple`, *optional*):
            `ranges` of each shared prefix that the forward reads, and last the ranges of its new tokens, each counted
            from 0. So a token of a prefix stays with the process that computed it. `None` without shared prefixes.
        new ([`ContextParallelLayout`], *optional*):
            The new tokens of a forward after shared prefixes, if it has any.

    Example: two processes and a row of five tokens.

    ```python
    >>> import torch
    >>> from trl_padfix import padding_free_layout

    >>> layout = padding_free_layout(torch.ones(1, 5))
    >>> cp = ContextParallelLayout(layout, Group(None, 0, 2))
    >>> cp.ranges, cp.tokens_per_rank
    ([[(0, 3)], [(3, 5)]], [3, 2])
    >>> cp.local(torch.arange(5)), cp.rank_of(torch.tensor([4, 2])), cp.local_index(torch.tensor([2]))
    (tensor([0, 1, 2]), tensor([1, 0]), tensor([2]))

    ```
    """

    layout: Layout
    group: Group
    whole_rows: bool = False
    parts: tuple[list[list[tuple[int, int]]], ...] | None = None
    new: ContextParallelLayout | None = None

    @classmethod
    def over(cls, layout: Layout | None, group: Group | None) -> ContextParallelLayout | None:
        """
        The tokens of a packed row that each process computes; `None` if each process computes the whole row.

        A row with fewer tokens than there are processes is computed whole: a process without tokens would have nothing
        to exchange.
        """
        if group is None or layout is None:
            return None
        if isinstance(layout, PrefixedLayout):
            assert layout.prefix_states is not None
            new = None if layout.new is None else cls(layout.new, group)
            ranges = [states.ranges for states in layout.prefix_states.reads] + ([] if new is None else [new.ranges])
            return cls(layout, group, parts=tuple(ranges), new=new)
        if layout.packed_tokens < group.size:
            return None
        # If each process can get whole rows with nearly equal token counts, layers need no communication. With filler
        # the counts must be exactly equal, so rows are cut.
        return cls(layout, group, whole_rows=layout.filler is None and ranges_of_rows(layout, group.size) is not None)

    @cached_property
    def ranges(self) -> list[list[tuple[int, int]]]:
        """Ranges of packed tokens of each process, as (begin, end): one each, unless processes have whole rows."""
        if self.parts is not None:
            ranges: list[list[tuple[int, int]]] = [[] for _ in range(self.group.size)]
            offset = 0
            for part in self.parts:
                for of_rank, local in zip(ranges, part, strict=True):
                    of_rank += [(offset + begin, offset + end) for begin, end in local]
                offset += sum(end - begin for local in part for begin, end in local)
            return ranges
        if self.whole_rows:
            rows = ranges_of_rows(self.layout, self.group.size)
            assert rows is not None, "the rows of this layout are not even"
            return rows
        ends = list(accumulate(even_split(self.layout.packed_tokens, self.group.size)))
        return [[chunk] for chunk in zip([0, *ends], ends, strict=False)]

    @cached_property
    def tokens_per_rank(self) -> list[int]:
        """Number of tokens of each process."""
        return [sum(end - begin for begin, end in ranges) for ranges in self.ranges]

    @property
    def local_tokens(self) -> int:
        """Number of tokens of this process, `t`."""
        return self.tokens_per_rank[self.group.rank]

    @cached_property
    def _rank_order(self) -> torch.Tensor:
        """The packed tokens in rank order: the tokens of process 0, then of process 1, ..."""
        tokens = torch.cat([torch.arange(begin, end) for ranges in self.ranges for begin, end in ranges])
        return tokens.to(self.layout.packed_index.device)

    @cached_property
    def index_in_rank_order(self) -> torch.Tensor:
        """Index of each packed token in `_rank_order`."""
        return inverse_permutation(self._rank_order)

    def local(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The values of the local tokens, selected from values for all packed tokens."""
        chunks = [x.narrow(dim, begin, end - begin) for begin, end in self.ranges[self.group.rank]]
        return torch.cat(chunks, dim) if len(chunks) > 1 else chunks[0].contiguous()

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of local tokens with the other processes."""
        from .operators import all_to_all_of  # registers an operator with torch

        orders = (None, None) if self._ranks_in_order else (self._rank_order, self.index_in_rank_order)
        return Exchange(self.group.rank, tuple(self.tokens_per_rank), all_to_all_of(self.group.group), *orders)

    def all_gather_for_loss(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather before the loss, `(t, ...)` to `(T, ...)`, in the order of the packed tokens."""
        in_rank_order = self.group.all_gather_for_loss(x, self.tokens_per_rank)
        return in_rank_order if self._ranks_in_order else in_rank_order.index_select(0, self.index_in_rank_order)

    @cached_property
    def _ranks_in_order(self) -> bool:
        """Whether rank order is the order of the packed tokens, as with one range per process."""
        begins = [begin for ranges in self.ranges for begin, _ in ranges]
        return begins == sorted(begins)

    def rank_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rank that computes each of these packed tokens, `(n,)` to `(n,)`."""
        ends = torch.tensor(self.tokens_per_rank, device=tokens.device).cumsum(0)
        return torch.searchsorted(ends, self.index_in_rank_order.index_select(0, tokens), right=True)

    def local_index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Index among the local tokens of these packed tokens, which must be local."""
        return self.index_in_rank_order.index_select(0, tokens) - sum(self.tokens_per_rank[: self.group.rank])

    def all_gather_at(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """All-gather before the loss, only the values of these packed `tokens`: `(t, ...)` to `(n, ...)`."""
        ranks = self.rank_of(tokens)
        local = x.index_select(0, self.local_index(tokens[ranks == self.group.rank]))
        counts = ranks.bincount(minlength=self.group.size).tolist()
        # Gathered values are in rank order (a stable sort by rank); the inverse restores the order of `tokens`.
        order = inverse_permutation(ranks.argsort(stable=True))
        return self.group.all_gather_for_loss(local, counts).index_select(0, order)

    @cached_property
    def local_layout(self) -> Layout:
        """Layout of the whole rows of this process."""
        assert self.whole_rows, "rows that are cut have their layout in common"
        layout, ranges = self.layout, self.ranges[self.group.rank]
        ends = accumulate(layout.queries.lengths)
        local = [i for i, end in enumerate(ends) if any(begin < end <= last for begin, last in ranges)]
        query_lengths, key_lengths = ([n[i] for i in local] for n in (layout.queries.lengths, layout.keys.lengths))
        paths = layout.key_tokens.split(layout.keys.lengths)
        key_index = self.local_index(torch.cat([paths[i] for i in local]))
        return Layout.of_segments(
            query_lengths,
            key_lengths,
            batch_shape=layout.batch_shape,
            real_index=layout.real_index,
            source=layout.source,
            packed_index=self.local(layout.packed_index),
            positions=self.local(layout.positions),
            key_index=None if query_lengths == key_lengths else key_index,
            spans=tuple(layout.spans[i] for i in local),
        )


def ranges_of_rows(layout: Layout, processes: int) -> list[list[tuple[int, int]]] | None:
    """
    Ranges of packed tokens of each process, if processes compute whole rows; `None` if their shares would be uneven.

    Rows that share a prefix go to one process. The largest groups of such rows are assigned first, each to the process
    with the fewest tokens (longest processing time first).

    Example: rows of 3, 2 and 1 tokens divide evenly among two processes, but not among three.

    ```python
    >>> import torch
    >>> from trl_padfix import padding_free_layout

    >>> layout = padding_free_layout(torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]))
    >>> ranges_of_rows(layout, 2), ranges_of_rows(layout, 3)
    ([[(0, 3)], [(3, 5), (5, 6)]], None)

    ```
    """
    ends = [*accumulate(layout.queries.lengths)]
    # A segment without shared keys begins a tree; segments after it, up to the next such one, share a prefix with it.
    begins = [end - q for end, q, k in zip(ends, layout.queries.lengths, layout.keys.lengths, strict=True) if q == k]
    trees = sorted(zip(begins, [*begins[1:], ends[-1]], strict=True), key=lambda tree: (tree[0] - tree[1], tree[0]))
    if len(trees) < processes:
        return None
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    for begin, end in trees:
        rank = tokens.index(min(tokens))
        ranges[rank].append((begin, end))
        tokens[rank] += end - begin
    return [sorted(of_rank) for of_rank in ranges] if max(tokens) <= MAX_SHARE * sum(tokens) / processes else None
