"""Token costs of the rows of tokenized data, for [`~trl_padfix.trainers.steps.costs`]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from datasets import Dataset

from ..data.columns import list_lengths
from .costs import RowCosts, pair_costs, prefix_costs, text_costs
from .grouping import common_prefixes, prefix_order


__all__ = ["PairMeasure", "RewardMeasure", "RowMeasure", "TextMeasure", "UnpairedMeasure"]


class _Columns(Protocol):
    def lengths(self, name: str) -> np.ndarray: ...

    def ids(self, name: str) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class RowMeasure:
    """
    Token costs of tokenized rows, given as examples or as a dataset.

    Attributes:
        max_length (`int`, *optional*): Longest row; longer ones are truncated.
        truncation_mode (`str`): `"keep_start"`, or `"keep_end"`, which leaves truncated rows nothing in common.
        sharing (`bool`): Whether tokens that rows begin with in common are computed once.
    """

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    sharing: bool = False

    def examples(self, examples: Sequence[dict[str, Any]]) -> RowCosts:
        return self._costs(_Examples(examples))

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        """Costs of the rows `numbers` of the train dataset, which are these examples."""
        return self.examples(examples)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """Whether a batch of these rows has the tokens that they were taken to have; of tokenized rows it has."""

    def dataset(self, dataset: Dataset) -> RowCosts:
        return self._costs(_Table(dataset))

    def longest(self, dataset: Dataset) -> np.ndarray:
        """Tokens of the longest sequence of each row, as it is trained on."""
        longest = self._longest(_Table(dataset))
        return longest if self.max_length is None else np.minimum(longest, self.max_length)

    def _costs(self, columns: _Columns) -> RowCosts:
        raise NotImplementedError

    def _longest(self, columns: _Columns) -> np.ndarray:
        raise NotImplementedError

    def _shared(self, each: np.ndarray, begins: list[np.ndarray], rows: np.ndarray) -> RowCosts:
        """Costs of rows of `rows` tokens that begin with `begins`, and cost `each` by themselves."""
        keys = np.array([len(ids) for ids in begins], dtype=np.int64)
        if self.max_length is not None:
            keys = np.minimum(keys, self.max_length)
            if self.truncation_mode == "keep_end":
                keys = np.where(rows <= self.max_length, keys, 0)
        return prefix_costs(each, keys, *prefix_order(begins))


@dataclass(frozen=True)
class PairMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of DPO."""

    def _costs(self, columns: _Columns) -> RowCosts:
        prompt, chosen, rejected = (columns.lengths(f"{name}_ids") for name in ("prompt", "chosen", "rejected"))
        how = {"max_length": self.max_length, "truncation_mode": self.truncation_mode}
        if not self.sharing:
            return pair_costs(prompt, chosen, rejected, **how)
        each = pair_costs(prompt, chosen, rejected, prompts=np.arange(len(prompt)), **how).each
        return self._shared(each, columns.ids("prompt_ids"), prompt + np.maximum(chosen, rejected))

    def _longest(self, columns: _Columns) -> np.ndarray:
        prompt, chosen, rejected = (columns.lengths(f"{name}_ids") for name in ("prompt", "chosen", "rejected"))
        return prompt + np.maximum(chosen, rejected)


@dataclass(frozen=True)
class RewardMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of a reward model, whose prompt is a part of both sequences."""

    def _costs(self, columns: _Columns) -> RowCosts:
        chosen, rejected = columns.lengths("chosen_ids"), columns.lengths("rejected_ids")
        limit = np.iinfo(np.int64).max if self.max_length is None else self.max_length
        each = np.minimum(chosen, limit) + np.minimum(rejected, limit)
        if not self.sharing:
            return text_costs(each)
        ids = columns.ids("chosen_ids")
        alike = np.minimum(common_prefixes(ids, columns.ids("rejected_ids")), limit)
        return self._shared(each - alike, ids, np.maximum(chosen, rejected))

    def _longest(self, columns: _Columns) -> np.ndarray:
        return np.maximum(columns.lengths("chosen_ids"), columns.lengths("rejected_ids"))


@dataclass(frozen=True)
class UnpairedMeasure(RowMeasure):
    """[`RowMeasure`] of prompts with one completion each, as KTO takes them."""

    def _costs(self, columns: _Columns) -> RowCosts:
        tokens = self._longest(columns)
        costs = text_costs(tokens, max_length=self.max_length)
        return self._shared(costs.each, columns.ids("prompt_ids"), tokens) if self.sharing else costs

    def _longest(self, columns: _Columns) -> np.ndarray:
        return columns.lengths("prompt_ids") + columns.lengths("completion_ids")


@dataclass(frozen=True)
class TextMeasure(RowMeasure):
    """[`RowMeasure`] of texts."""

    def _costs(self, columns: _Columns) -> RowCosts:
        tokens = self._longest(columns)
        costs = text_costs(tokens, max_length=self.max_length)
        return self._shared(costs.each, columns.ids("input_ids"), tokens) if self.sharing else costs

    def _longest(self, columns: _Columns) -> np.ndarray:
        return columns.lengths("input_ids")


@dataclass(frozen=True)
class _Examples:
    """Columns of a list of examples."""

    examples: Sequence[dict[str, Any]]

    def lengths(self, name: str) -> np.ndarray:
        return np.array([len(example[name]) for example in self.examples], dtype=np.int64)

    def ids(self, name: str) -> list[np.ndarray]:
        return [np.asarray(example[name], dtype=np.int64) for example in self.examples]


@dataclass(frozen=True)
class _Table:
    """Columns of a dataset."""

    rows: Dataset

    def lengths(self, name: str) -> np.ndarray:
        return list_lengths(self.rows, name)

    def ids(self, name: str) -> list[np.ndarray]:
        found = []
        for table in self.rows.select_columns([name]).with_format("arrow").iter(10_000):
            for chunk in table[name].chunks:
                offsets, ids = chunk.offsets.to_numpy(), chunk.values.to_numpy(zero_copy_only=False)
                found += [ids[a:b] for a, b in pairwise(offsets.tolist())]
        return found
