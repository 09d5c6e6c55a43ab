"""
Token costs of rows: the tokens that they put through the decoder, and the prefixes that they share.

A row is the unit in which a trainer counts its batches: a preference pair, or a text. Plain functions on token ids and
token counts, independent of trainers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ...core.layout.build import common_bytes, sort_rows
from ..data.columns import lists


__all__ = [
    "RowCosts", "batch_costs", "dataset_costs", "prefix_costs", "sort_by_prefix", "text_costs", "truncated_tokens",
]  # fmt: skip


MIN_SHARED_FRACTION = 0.1
"""Rows belong to one group if they share this fraction of the shorter row's tokens, or more."""


@dataclass(frozen=True, eq=False)
class RowCosts:
    """
    Tokens that rows put through the decoder, where shared prefixes are computed once.

    Attributes:
        tokens (`np.ndarray` of shape `(n,)`): Tokens of each row in a batch of its own.
        order (`np.ndarray` of shape `(n,)`): The rows, sorted so that those with a shared prefix are adjacent.
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
        Shared prefixes of the sorted rows at ascending `ranks`: for two rows that are not adjacent, the minimum of
        `shared` between them. With `shared` `[0, 5, 3]`, ranks `[0, 2]` give `[0, 3]`.
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
        """Whether each row of `order` is in the group of the one before it, `(n,)`; ignores the prefix of all rows."""
        costs = self.without_shared(self.shared_by_all)
        tokens, shared = costs.tokens[costs.order], costs.shared
        return (shared > 0) & (shared >= MIN_SHARED_FRACTION * np.minimum(tokens, np.roll(tokens, 1)))

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
    Costs of rows of `tokens`; other rows may share the first `shareable`. All arrays are `(n,)`.

    `order` and `shared` come from [`sort_by_prefix`].
    """
    return RowCosts(tokens, order, np.minimum(shared, np.minimum(shareable[order], np.roll(shareable[order], 1))))


def sort_by_prefix(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """
    Sort rows by their token ids. Returns their order, and the number of tokens that each sorted row shares with the
    one before it: `[[1, 2], [3], [1, 2, 4]]` give `[0, 2, 1]` and `[0, 2, 0]`.
    """
    order, common = sort_rows([_key(row) for row in ids], width=4)
    return np.array(order, dtype=np.int64), np.array(common, dtype=np.int64)


def _key(ids: np.ndarray) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()  # bytes of big-endian numbers sort like the numbers


def dataset_costs(
    rows: Dataset | Sequence[dict[str, Any]],
    sequences: Sequence[tuple[str, ...]],
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    sharing: bool = False,
) -> RowCosts:
    """
    Costs of the tokenized rows of a dataset, or of examples.

    Args:
        rows (`Dataset` or `Sequence[dict]`):
            The rows.
        sequences (`Sequence[tuple[str, ...]]`):
            The columns of each sequence of a row, in their order: for a pair `("prompt_ids", "chosen_ids")` and
            `("prompt_ids", "rejected_ids")`. Only the first column counts for shared prefixes.
        max_length (`int`, *optional*), truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            As in [`truncated_tokens`].
        sharing (`bool`, *optional*, defaults to `False`):
            Whether shared prefixes are computed once.
    """
    names = dict.fromkeys(chain(*sequences))
    if isinstance(rows, Dataset):
        columns = {name: list(lists(rows, name)) for name in names}
    else:
        columns = {name: [np.asarray(row[name], dtype=np.int64) for row in rows] for name in names}
    lengths = {name: np.array([len(ids) for ids in ids_of_rows]) for name, ids_of_rows in columns.items()}
    begins = [columns[names[0]] for names in sequences]
    tokens, shareable = truncated_tokens(
        np.stack([np.sum([lengths[name] for name in names], axis=0) for names in sequences]),
        lengths[sequences[0][0]],
        max_length,
        truncation_mode,
    )
    return _shared_costs(begins, tokens, shareable) if sharing else text_costs(tokens)


def batch_costs(ids: torch.Tensor, mask: torch.Tensor, rows_per_item: int, sharing: bool) -> RowCosts:
    """
    Costs of the items of a padded batch on the host.

    Args:
        ids (`torch.Tensor` of shape `(B, L)`):
            Token IDs, block by block: item `i` has the rows `i`, `i + B / rows_per_item`, ...
        mask (`torch.Tensor` of shape `(B, L)`):
            1 at real tokens.
        rows_per_item (`int`):
            Rows of an item.
        sharing (`bool`):
            Whether shared prefixes are computed once.
    """
    rows = [row[keep] for row, keep in zip(ids.numpy(), mask.numpy().astype(bool), strict=True)]
    items = len(rows) // rows_per_item
    blocks = [rows[begin : begin + items] for begin in range(0, len(rows), items)]
    lengths = np.array([[len(row) for row in block] for block in blocks])
    tokens = lengths.sum(0)
    return _shared_costs(blocks, tokens, lengths[0]) if sharing else text_costs(tokens)


def _shared_costs(begins: Sequence[Sequence[np.ndarray]], tokens: np.ndarray, shareable: np.ndarray) -> RowCosts:
    """
    Costs of rows of `tokens`, where shared prefixes are computed once.

    `begins` has the ids with which each sequence of a row begins: `k` lists, one per sequence, each with `n` rows.
    Other rows may share the first `shareable` ids of the first sequence.
    """
    first, *others = begins
    for other in others:  # the sequences of a row share among themselves, too
        pairs = zip(first, other, strict=True)
        common = np.array([common_bytes(_key(a), _key(b)) // 4 for a, b in pairs], dtype=np.int64)
        tokens = tokens - np.minimum(common, shareable)
    return prefix_costs(tokens, shareable, *sort_by_prefix(first))
