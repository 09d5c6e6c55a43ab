"""
Token costs of rows: the tokens that they put through the decoder, and the prefixes that they share.

A row is the unit in which a trainer counts its batches: a preference pair, or a text. Plain functions on token counts,
independent of trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


__all__ = ["RowCosts", "prefix_costs", "text_costs", "truncated_tokens"]


MIN_SHARED_FRACTION = 0.1
"""Rows belong to one group if they share this fraction of the shorter row's tokens, or more."""


@dataclass(frozen=True, eq=False)
class RowCosts:
    """
    Tokens that rows put through the decoder, where shared prefixes are computed once.

    Attributes:
        tokens (`np.ndarray` of shape `(n,)`): Tokens of each row in a batch of its own.
        order (`np.ndarray` of shape `(n,)`): The rows, sorted so that those with a shared prefix are neighbours.
        shared (`np.ndarray` of shape `(n,)`): Tokens that each row of `order` shares with the one before it (the LCP
            array of the sorted rows).
    """

    tokens: np.ndarray
    order: np.ndarray
    shared: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> RowCosts:
        """The costs of some rows; a row may be named more than once."""
        rows = np.arange(len(self))[rows]
        rank = np.empty(len(self), dtype=np.int64)
        rank[self.order] = np.arange(len(self))  # inverse permutation
        order = np.argsort(rank[rows], kind="stable")
        return RowCosts(self.tokens[rows], order, self._shared_in_subset(rank[rows[order]]))

    def _shared_in_subset(self, ranks: np.ndarray) -> np.ndarray:
        """
        Shared prefixes of the sorted rows at these ascending `ranks`: of two rows that are not neighbours it is the
        minimum of `shared` between them. With `shared` `[0, 5, 3]`, ranks `[0, 2]` give `[0, 3]`.
        """
        shared = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:
            minimum = np.minimum.reduceat(np.append(self.shared, 0), ranks + 1)[:-1]
            # A row that is selected twice, as when accelerate fills the last step, counts in full both times.
            shared[1:] = np.where(np.diff(ranks), minimum, 0)
        return shared

    @property
    def shared_by_all(self) -> int:
        """Tokens that all rows begin with in common; 0 for a single row."""
        return int(self.shared[1:].min(initial=self.tokens.max(initial=0))) if len(self) > 1 else 0

    def without_shared(self, tokens: int) -> RowCosts:
        """The costs without the first `tokens` of each row, which all of them share."""
        return RowCosts(self.tokens - tokens, self.order, np.maximum(self.shared - tokens, 0))

    @property
    def same_group(self) -> np.ndarray:
        """Whether each row of `order` is in the group of the one before it, `(n,)`; the prefix of all rows aside."""
        costs = self.without_shared(self.shared_by_all)
        tokens, shared = costs.tokens[costs.order], costs.shared
        shorter = np.minimum(tokens, np.roll(tokens, 1))
        return (shared > 0) & (shared >= MIN_SHARED_FRACTION * shorter)

    def total(self, rows: Any = slice(None)) -> int:
        """Tokens of one batch of `rows`."""
        costs = self[rows]
        return int(costs.tokens.sum() - costs.shared.sum())


def truncated_tokens(
    lengths: np.ndarray, prompts: np.ndarray, max_length: int | None = None, truncation_mode: str = "keep_start"
) -> tuple[np.ndarray, np.ndarray]:
    """
    Tokens of rows after truncation, and how many of their first tokens other rows may share.

    Args:
        lengths (`np.ndarray` of shape `(k, n)`):
            Tokens of the `k` sequences of each row.
        prompts (`np.ndarray` of shape `(n,)`):
            Tokens of the prompt with which the sequences of each row begin. Other rows may share it.
        max_length (`int`, *optional*):
            Tokens that are kept of a sequence.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            With `"keep_end"` a truncated sequence loses its beginning, so it shares nothing.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: both of shape `(n,)`.
    """
    limit = np.iinfo(np.int64).max if max_length is None else max_length
    prompts = np.minimum(prompts, limit)
    if truncation_mode == "keep_end":
        prompts = np.where((lengths <= limit).all(0), prompts, 0)
    return np.minimum(lengths, limit).sum(0), prompts


def text_costs(tokens: Sequence[int] | np.ndarray) -> RowCosts:
    """Costs of rows that share nothing."""
    tokens = np.asarray(tokens, dtype=np.int64)
    return RowCosts(tokens, np.arange(len(tokens)), np.zeros_like(tokens))


def prefix_costs(tokens: np.ndarray, shareable: np.ndarray, order: np.ndarray, shared: np.ndarray) -> RowCosts:
    """
    Costs of rows of `tokens`, of which the first `shareable` may be shared with other rows, all `(n,)`.

    `order` and `shared` are those of [`sort_by_prefix`].
    """
    limit = np.minimum(shareable[order], np.roll(shareable[order], 1))
    return RowCosts(tokens, order, np.minimum(shared, limit))
