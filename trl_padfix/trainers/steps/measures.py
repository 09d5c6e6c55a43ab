"""Token costs of the rows of tokenized data, for [`~trl_padfix.trainers.steps.costs`]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from ..data.columns import lists
from .costs import RowCosts, pair_costs, prefix_costs, text_costs
from .grouping import common_prefixes, prefix_order


__all__ = ["PairMeasure", "RewardMeasure", "RowMeasure", "TextMeasure", "UnpairedMeasure"]


Columns = Callable[[str], list[np.ndarray]]
"""Gives the token ids of each row in the column of a name."""


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

    begins: ClassVar[str] = ""
    """Name of the column with the beginnings of rows, which they may have in common."""

    def examples(self, examples: Sequence[dict[str, Any]]) -> RowCosts:
        return self._costs(lambda name: [np.asarray(example[name], dtype=np.int64) for example in examples])

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        """Costs of the rows `numbers` of the train dataset, which are these examples."""
        return self.examples(examples)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """Raise if a batch of these rows has other token counts than were planned; tokenized rows cannot."""

    def dataset(self, dataset: Dataset) -> RowCosts:
        return self._costs(lambda name: list(lists(dataset, name)))

    def longest(self, dataset: Dataset) -> np.ndarray:
        """Tokens of the longest sequence of each row, as it is trained on."""
        return np.minimum(self._longest(lambda name: list(lists(dataset, name))), self._limit)

    @property
    def _limit(self) -> int:
        return np.iinfo(np.int64).max if self.max_length is None else self.max_length

    def _costs(self, columns: Columns) -> RowCosts:
        """Costs of rows of one sequence, which begin with what the column `begins` has."""
        tokens = self._longest(columns)
        each = np.minimum(tokens, self._limit)
        return self._shared(each, columns(self.begins), tokens) if self.sharing else text_costs(each)

    def _longest(self, columns: Columns) -> np.ndarray:
        raise NotImplementedError

    def _shared(self, each: np.ndarray, begins: list[np.ndarray], rows: np.ndarray) -> RowCosts:
        """Costs of rows that have `rows` tokens before truncation, begin with `begins`, and alone cost `each`."""
        keys = np.minimum(_lengths(begins), self._limit)
        if self.truncation_mode == "keep_end":
            keys = np.where(rows <= self._limit, keys, 0)
        return prefix_costs(each, keys, *prefix_order(begins))


@dataclass(frozen=True)
class PairMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of DPO."""

    def _costs(self, columns: Columns) -> RowCosts:
        ids = [columns(f"{name}_ids") for name in ("prompt", "chosen", "rejected")]
        prompt, chosen, rejected = map(_lengths, ids)
        how = {"max_length": self.max_length, "truncation_mode": self.truncation_mode}
        if not self.sharing:
            return pair_costs(prompt, chosen, rejected, **how)
        each = pair_costs(prompt, chosen, rejected, prompts=np.arange(len(prompt)), **how).each
        return self._shared(each, ids[0], prompt + np.maximum(chosen, rejected))

    def _longest(self, columns: Columns) -> np.ndarray:
        prompt, chosen, rejected = (_lengths(columns(f"{name}_ids")) for name in ("prompt", "chosen", "rejected"))
        return prompt + np.maximum(chosen, rejected)


@dataclass(frozen=True)
class RewardMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of a reward model, whose prompt is a part of both sequences."""

    def _costs(self, columns: Columns) -> RowCosts:
        ids = [columns(f"{name}_ids") for name in ("chosen", "rejected")]
        chosen, rejected = map(_lengths, ids)
        each = np.minimum(chosen, self._limit) + np.minimum(rejected, self._limit)
        if not self.sharing:
            return text_costs(each)
        alike = np.minimum(common_prefixes(*ids), self._limit)
        return self._shared(each - alike, ids[0], np.maximum(chosen, rejected))

    def _longest(self, columns: Columns) -> np.ndarray:
        return np.maximum(*(_lengths(columns(f"{name}_ids")) for name in ("chosen", "rejected")))


@dataclass(frozen=True)
class UnpairedMeasure(RowMeasure):
    """[`RowMeasure`] of prompts with one completion each, as KTO takes them."""

    begins = "prompt_ids"

    def _longest(self, columns: Columns) -> np.ndarray:
        return _lengths(columns("prompt_ids")) + _lengths(columns("completion_ids"))


@dataclass(frozen=True)
class TextMeasure(RowMeasure):
    """[`RowMeasure`] of texts."""

    begins = "input_ids"

    def _longest(self, columns: Columns) -> np.ndarray:
        return _lengths(columns("input_ids"))


def _lengths(rows: list[np.ndarray]) -> np.ndarray:
    return np.array([len(ids) for ids in rows], dtype=np.int64)
