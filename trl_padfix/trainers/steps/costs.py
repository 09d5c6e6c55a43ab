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


__all__ = ["RowCosts", "pair_costs", "prefix_costs", "text_costs"]


WORTH_JOINING = 0.1
"""Rows belong to one group if they have this share of the shorter one's tokens in common."""


@dataclass(frozen=True, eq=False)
class RowCosts:
    """
    Tokens that rows put through the decoder, and what they begin with in common, which is computed once.

    Attributes:
        each (`np.ndarray` of shape `(n,)`): Tokens of each row in a batch of its own.
        order (`np.ndarray` of shape `(n,)`): The rows, those that begin alike next to one another.
        common (`np.ndarray` of shape `(n,)`): Tokens that each row of `order` has in common with the one before it.
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
        """
        Whether each row of `order` belongs to the group of the one before it, `(n,)`: they have much in common.

        What all rows have in common does not count, since it is in every batch.
        """
        costs = self.without_common(self.common_to_all)
        each, common = costs.each[costs.order], costs.common
        shorter = np.minimum(each, np.roll(each, 1))
        return (common > 0) & (common >= WORTH_JOINING * shorter)

    def total(self, rows: Any = slice(None)) -> int:
        """Tokens of one batch of `rows`."""
        costs = self[rows]
        return int(costs.each.sum() - costs.common.sum())


def pair_costs(
    prompt: Sequence[int] | np.ndarray,
    chosen: Sequence[int] | np.ndarray,
    rejected: Sequence[int] | np.ndarray,
    *,
    prompts: Sequence[int] | np.ndarray | None = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> RowCosts:
    """
    Tokens of preference pairs, as TRL's collator truncates them.

    Tokens that the two completions begin with in common are not counted as shared: the true costs may be lower.

    Args:
        prompt, chosen, rejected (`Sequence[int]` of length `n`):
            How many tokens each part of each pair has.
        prompts (`Sequence[int]` of length `n`, *optional*):
            A number for the prompt of each pair, equal for equal prompts, where prompts are computed once.
        max_length, truncation_mode:
            As in TRL; `"keep_end"` leaves pairs with a truncated row nothing in common.

    Returns:
        [`RowCosts`], a row for each pair.

    Example:

    ```python
    >>> from trl_padfix.trainers.steps.costs import pair_costs

    >>> pair_costs([10, 10], [4, 6], [2, 9], prompts=[7, 7], max_length=16).total()
    28

    ```
    """
    prompt, chosen, rejected = (np.asarray(x, dtype=np.int64) for x in (prompt, chosen, rejected))
    rows = np.stack([prompt + chosen, prompt + rejected])
    limit = np.iinfo(np.int64).max if max_length is None else max_length
    real = np.minimum(rows, limit).sum(0)
    if prompts is None:
        return RowCosts(real, np.arange(len(real)), np.zeros_like(real))
    in_common = np.minimum(prompt, limit)
    if truncation_mode == "keep_end":
        in_common = np.where((rows <= limit).all(0), in_common, 0)
    order = np.argsort(np.asarray(prompts), kind="stable")
    number = np.asarray(prompts)[order]
    common = np.where(number == np.roll(number, 1), np.minimum(in_common[order], np.roll(in_common[order], 1)), 0)
    common[:1] = 0
    return RowCosts(real - in_common, order, common)


def text_costs(tokens: Sequence[int] | np.ndarray, *, max_length: int | None = None) -> RowCosts:
    """Tokens of rows that have nothing in common."""
    tokens = np.asarray(tokens, dtype=np.int64)
    each = tokens if max_length is None else np.minimum(tokens, max_length)
    return RowCosts(each, np.arange(len(each)), np.zeros_like(each))


def prefix_costs(each: np.ndarray, keys: np.ndarray, order: np.ndarray, common: np.ndarray) -> RowCosts:
    """
    Costs of rows of `each` tokens, which share at most their first `keys` tokens with others, all `(n,)`.

    `order` and `common` are those of [`~trl_padfix.trainers.steps.grouping.prefix_order`].
    """
    limit = np.minimum(keys[order], np.roll(keys[order], 1))
    return RowCosts(each, order, np.minimum(common, limit))
