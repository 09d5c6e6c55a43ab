"""
A packed row in slices, one for each process of a group.

Every process has the same batch and the same layout. Between its mixers a decoder computes each token by itself, and a
process its own tokens only; mixers see all tokens ([`ContextParallelLayout.how`]), and the loss is told what others have computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from ..layout.layout import Layout
from .collectives import Group, even


__all__ = ["HEADS", "KEYS", "ContextParallelConfig", "ContextParallelLayout"]

HEADS, KEYS = "heads", "keys"


@dataclass(frozen=True)
class ContextParallelConfig:
    """
    Between which processes packed rows are split.

    Attributes:
        group ([`Group`]): The processes.
        attention (`str`): `"heads"` or `"keys"`, what is exchanged for attention.
    """

    group: Group
    attention: str = HEADS


@dataclass(frozen=True, eq=False)
class ContextParallelLayout:
    """
    The packed row of a layout, cut for the processes of a group.

    Attributes:
        layout ([`Layout`]):
            The layout of the whole row, `T` tokens.
        group ([`Group`]):
            The processes, `n` of them.
        how (`str`):
            How attention sees all tokens. `"heads"`: a process attends with some heads for all tokens. `"keys"`: with
            all heads for its own tokens, to keys and values that all have gathered.
    """

    layout: Layout
    group: Group
    how: str

    @cached_property
    def pieces(self) -> list[list[tuple[int, int]]]:
        """
        Pieces of the row that belong to each process, from a token to a token.

        One piece for exchanged heads. For gathered keys two, from the front and from the back of the row: the later a
        token, the more keys it sees.
        """
        n, halves = self.group.size, 2 if self.how == KEYS and self.layout.packed_tokens >= 2 * self.group.size else 1
        ends = list(accumulate(even(self.layout.packed_tokens, n * halves)))
        cuts = list(zip([0, *ends], ends, strict=False))
        return [[cuts[r], cuts[-1 - r]] if halves == 2 else [cuts[r]] for r in range(n)]

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of each process."""
        return [sum(end - begin for begin, end in pieces) for pieces in self.pieces]

    @cached_property
    def _dealt(self) -> torch.Tensor:
        """The packed tokens of all processes, one process after the other."""
        dealt = torch.cat([torch.arange(*piece) for pieces in self.pieces for piece in pieces])
        return dealt.to(self.layout.packed_index.device)

    @cached_property
    def _place(self) -> torch.Tensor:
        """Where each packed token stands in `_dealt`."""
        return self._dealt.argsort()

    def cut(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Of values for all packed tokens, those of this process's."""
        parts = [x.narrow(dim, begin, end - begin) for begin, end in self.pieces[self.group.rank]]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def to_heads(self, x: torch.Tensor, heads: list[int]) -> torch.Tensor:
        """`(t, N, ...)`, own tokens, to `(T, own heads, ...)`; process `i` is given `heads[i]`."""
        shapes = [(n, heads[self.group.rank], *x.shape[2:]) for n in self.tokens]
        return self._in_order(torch.cat(self.group.dealt(x.split(heads, dim=1), shapes)))

    def to_tokens(self, x: torch.Tensor, heads: list[int]) -> torch.Tensor:
        """`(T, own heads, ...)` to `(t, N, ...)`, own tokens: the way back."""
        pieces = [[x[begin:end] for begin, end in pieces] for pieces in self.pieces]
        parts = [torch.cat(piece) if len(piece) > 1 else piece[0] for piece in pieces]
        own = self.tokens[self.group.rank]
        return torch.cat(self.group.dealt(parts, [(own, n, *x.shape[2:]) for n in heads]), dim=1)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """`(t, ...)` to `(T, ...)`, within the network; in the order of [`ContextParallelLayout.queries`]' keys."""
        return self.group.gathered(x, self.tokens)

    def told(self, x: torch.Tensor) -> torch.Tensor:
        """`(t, ...)` to `(T, ...)` at the exit."""
        return self._in_order(self.group.told(x, self.tokens))

    def _in_order(self, x: torch.Tensor) -> torch.Tensor:
        return x if len(self.pieces[0]) == 1 else x.index_select(0, self._place)

    def owners(self, tokens: torch.Tensor) -> torch.Tensor:
        """The process of each of some packed tokens, `(n,)` to `(n,)`."""
        ends = torch.tensor(self.tokens, device=tokens.device).cumsum(0)
        return torch.searchsorted(ends, self._place.index_select(0, tokens), right=True)

    def among_own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where some of this process's packed tokens stand among them."""
        return self._place.index_select(0, tokens) - sum(self.tokens[: self.group.rank])

    def told_of(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Of values of own tokens, `(t, ...)`, those of any packed `tokens`, `(n, ...)`, at the exit."""
        owner = self.owners(tokens)
        own = x.index_select(0, self.among_own(tokens[owner == self.group.rank]))
        counts = owner.bincount(minlength=self.group.size).tolist()
        return self.group.told(own, counts).index_select(0, owner.argsort(stable=True).argsort())

    @cached_property
    def queries(self) -> Layout:
        """Own tokens as queries, all as keys: a row's part ends, as its keys do, where a piece ends."""
        layout, positions = self.layout, self.layout.positions.cpu()
        keys = torch.arange(layout.packed_tokens) if layout.key_index is None else layout.key_index.cpu()
        ends = list(accumulate(layout.query_lengths))
        segments = list(zip(ends, layout.query_lengths, keys.split(layout.key_lengths), strict=True))
        queries, seen = [], []
        for low, high in self.pieces[self.group.rank]:
            for end, n, path in segments:
                begin, last = max(end - n, low), min(end, high)
                if begin < last:
                    queries.append(last - begin)
                    seen.append(path[: len(path) - (end - last)])
        return Layout.of_segments(
            queries,
            [len(path) for path in seen],
            batch_shape=layout.batch_shape,
            real_index=layout.real_index,
            source=layout.source,
            packed_index=self.cut(layout.packed_index),
            positions=self.cut(layout.positions),
            key_index=self._place.index_select(0, torch.cat(seen).to(layout.packed_index.device)),
            spans=tuple(int(positions[path[-1]] - positions[path[0]]) + 1 for path in seen),
            positions_among=layout.positions.index_select(0, self._dealt),
        )
