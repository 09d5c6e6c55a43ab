"""Counts the tokens of tokenized rows, and gives them as [`~trl_padfix.trainers.batching.token_costs.RowCosts`]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset

from ..data.columns import lists
from .prefix_groups import shared_prefix_lengths, sort_by_prefix
from .token_costs import RowCosts, prefix_costs, text_costs, truncated_tokens


__all__ = ["PairMeasure", "RewardMeasure", "RowMeasure", "TextMeasure", "UnpairedMeasure", "batch_costs"]


@dataclass(frozen=True)
class RowMeasure:
    """
    Counts the tokens of tokenized rows, given as examples or as a dataset.

    Sequences of more than `max_length` tokens are truncated. If that removes their beginning (`"keep_end"`), they
    share nothing. With `sharing` shared prefixes are computed once.
    """

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    sharing: bool = False

    sequences: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The columns of each sequence of a row, in their order. Only the first column counts for shared prefixes."""

    def costs(self, rows: Dataset | Sequence[dict[str, Any]]) -> RowCosts:
        """Costs of the rows of a dataset, or of examples."""
        columns = self._columns(rows)
        begins = [columns[names[0]] for names in self.sequences]
        tokens, shareable = truncated_tokens(
            self._lengths(columns), np.array([len(ids) for ids in begins[0]]), self.max_length, self.truncation_mode
        )
        return _shared_costs(begins, tokens, shareable) if self.sharing else text_costs(tokens)

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        """Costs of `examples`, the rows `numbers` of the train dataset."""
        return self.costs(examples)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """Raise if a batch of these rows has other token counts than planned. For tokenized rows it cannot differ."""

    def longest(self, rows: Dataset | Sequence[dict[str, Any]]) -> np.ndarray:
        """Tokens of the longest sequence of each row, after truncation, `(n,)`."""
        longest = self._lengths(self._columns(rows)).max(0)
        return longest if self.max_length is None else np.minimum(longest, self.max_length)

    def _columns(self, rows: Dataset | Sequence[dict[str, Any]]) -> dict[str, list[np.ndarray]]:
        """The token ids of each column of [`sequences`], row by row."""
        names = dict.fromkeys(chain(*self.sequences))
        if isinstance(rows, Dataset):
            return {name: list(lists(rows, name)) for name in names}
        return {name: [np.asarray(row[name], dtype=np.int64) for row in rows] for name in names}

    def _lengths(self, columns: dict[str, list[np.ndarray]]) -> np.ndarray:
        """Tokens of the sequences of each row before truncation, `(k, n)`."""
        lengths = {name: np.array([len(ids) for ids in rows], dtype=np.int64) for name, rows in columns.items()}
        return np.stack([np.sum([lengths[name] for name in names], axis=0) for names in self.sequences])


def _shared_costs(begins: Sequence[Sequence[np.ndarray]], tokens: np.ndarray, shareable: np.ndarray) -> RowCosts:
    """
    Costs of rows of `tokens`, where shared prefixes are computed once.

    `begins` has the ids with which each sequence of a row begins: `k` lists, one per sequence, each with `n` rows.
    Other rows may share the first `shareable` ids of the first sequence.
    """
    first, *others = begins
    for other in others:  # the sequences of a row share among themselves, too
        tokens = tokens - np.minimum(shared_prefix_lengths(first, other), shareable)
    return prefix_costs(tokens, shareable, *sort_by_prefix(first))


class PairMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of DPO."""

    sequences = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))


class RewardMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of a reward model, with the prompt in both sequences."""

    sequences = (("chosen_ids",), ("rejected_ids",))


class UnpairedMeasure(RowMeasure):
    """[`RowMeasure`] of prompts with one completion each, for KTO."""

    sequences = (("prompt_ids", "completion_ids"),)


class TextMeasure(RowMeasure):
    """[`RowMeasure`] of texts."""

    sequences = (("input_ids",),)


def batch_costs(ids: torch.Tensor, mask: torch.Tensor, rows_per_item: int, sharing: bool) -> RowCosts:
    """
    Costs of the items of a padded batch.

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
