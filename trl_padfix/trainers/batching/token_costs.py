"""
What rows cost: the tokens that they put through the decoder, and those that they begin with in common.

A row is what a trainer counts its batches in: a preference pair, or a text. Plain functions on token counts; nothing
here knows of trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


__all__ = ["RowCosts", "prefix_costs", "text_costs", "truncated_tokens"]


WORTH_JOINING = 0.1
"""Rows belong to one group if they have this share of the shorter one's tokens in common."""


@dataclass(frozen=True, eq=False)
class RowCosts:
    """
    Tokens that rows put through the decoder, and what they begin with in common, which is computed once.

    Attributes, each `(n,)`: tokens of each row in a batch of its own; the rows in an `order` in which those that begin
    alike are neighbours; the tokens that each of these has in common with the one before it.
    """

    each: np.ndarray
    order: np.ndarray
    common: np.ndarray

    def __len__(self) -> int:
        return len(self.each)

    def __getitem__(self, rows: Any) -> RowCosts:
        """The costs of some rows, as often as they are named."""
        rows = np.arange(len(self))[rows]
        rank = np.empty(len(self), dtype=np.int64)
        rank[self.order] = np.arange(len(self))
        order = np.argsort(rank[rows], kind="stable")
        return RowCosts(self.each[rows], order, self._between(rank[rows[order]]))

    def _between(self, ranks: np.ndarray) -> np.ndarray:
        """What the sorted rows at these ascending `ranks` have in common with the one before: the least in between."""
        common = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:
            found = np.minimum.reduceat(np.append(self.common, 0), ranks + 1)[:-1]
            common[1:] = np.where(np.diff(ranks), found, 0)
        return common

    @property
    def common_to_all(self) -> int:
        """How many tokens all rows begin with in common; 0 for a single row."""
        return int(self.common[1:].min(initial=self.each.max(initial=0))) if len(self) > 1 else 0

    def without_common(self, tokens: int) -> RowCosts:
        """The costs without the first `tokens` of each row, which all of them have in common."""
        return RowCosts(self.each - tokens, self.order, np.maximum(self.common - tokens, 0))

    @property
    def joined(self) -> np.ndarray:
        """Whether each row of `order` has much in common with the one before it, `(n,)`, beyond what all rows have."""
        costs = self.without_common(self.common_to_all)
        each, common = costs.each[costs.order], costs.common
        shorter = np.minimum(each, np.roll(each, 1))
        return (common > 0) & (common >= WORTH_JOINING * shorter)

    def total(self, rows: Any = slice(None)) -> int:
        """Tokens of one batch of `rows`."""
        costs = self[rows]
        return int(costs.each.sum() - costs.common.sum())


def truncated_tokens(
    lengths: np.ndarray, begins: np.ndarray, max_length: int | None = None, truncation_mode: str = "keep_start"
) -> tuple[np.ndarray, np.ndarray]:
    """
    Tokens of rows whose `k` sequences have these `lengths`, `(k, n)`, and what is left of their `begins`, both `(n,)`.

    Sequences truncated at the start (`"keep_end"`) begin with nothing that another one could begin with.
    """
    limit = np.iinfo(np.int64).max if max_length is None else max_length
    begins = np.minimum(begins, limit)
    if truncation_mode == "keep_end":
        begins = np.where((lengths <= limit).all(0), begins, 0)
    return np.minimum(lengths, limit).sum(0), begins


def text_costs(tokens: Sequence[int] | np.ndarray) -> RowCosts:
    """Tokens of rows that have nothing in common."""
    each = np.asarray(tokens, dtype=np.int64)
    return RowCosts(each, np.arange(len(each)), np.zeros_like(each))


def prefix_costs(each: np.ndarray, keys: np.ndarray, order: np.ndarray, common: np.ndarray) -> RowCosts:
    """
    Costs of rows of `each` tokens, which share at most their first `keys` tokens with others, all `(n,)`.

    `order` and `common` are those of [`sort_by_prefix`].
    """
    limit = np.minimum(keys[order], np.roll(keys[order], 1))
    return RowCosts(each, order, np.minimum(common, limit))
