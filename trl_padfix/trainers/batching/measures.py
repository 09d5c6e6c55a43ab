"""Token costs of the rows of tokenized data, for [`~trl_padfix.trainers.batching.token_costs`]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from ..data.columns import lists
from .prefix_groups import shared_prefix_lengths, sort_by_prefix
from .token_costs import RowCosts, prefix_costs, text_costs, truncated_tokens


__all__ = ["PairMeasure", "RewardMeasure", "RowMeasure", "TextMeasure", "UnpairedMeasure"]


@dataclass(frozen=True)
class RowMeasure:
    """
    Token costs of tokenized rows, given as examples or as a dataset.

    Sequences of more than `max_length` tokens are truncated, and have nothing in common if that is done at the start
    (`"keep_end"`). With `sharing` tokens that sequences begin with in common are computed once.
    """

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    sharing: bool = False

    sequences: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The columns that each sequence of a row is made of; what it shares with others is counted in the first one."""

    def examples(self, examples: Sequence[dict[str, Any]]) -> RowCosts:
        return self._costs(lambda name: [np.asarray(example[name], dtype=np.int64) for example in examples])

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        """Costs of the rows `numbers` of the train dataset, which are these examples."""
        return self.examples(examples)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """Raise if a batch of these rows has other token counts than were planned; tokenized rows cannot."""

    def dataset(self, dataset: Dataset) -> RowCosts:
        return self._costs(partial(_read, dataset))

    def longest(self, dataset: Dataset) -> np.ndarray:
        """Tokens of the longest sequence of each row, as it is trained on."""
        longest = self._lengths(self._columns(partial(_read, dataset))).max(0)
        return longest if self.max_length is None else np.minimum(longest, self.max_length)

    def _columns(self, read: Callable[[str], list[np.ndarray]]) -> dict[str, list[np.ndarray]]:
        return {name: read(name) for name in dict.fromkeys(chain(*self.sequences))}

    def _lengths(self, columns: dict[str, list[np.ndarray]]) -> np.ndarray:
        """Tokens of the sequences of each row before truncation, `(k, n)`."""
        lengths = {name: np.array([len(ids) for ids in rows], dtype=np.int64) for name, rows in columns.items()}
        return np.stack([np.sum([lengths[name] for name in names], axis=0) for names in self.sequences])

    def _costs(self, read: Callable[[str], list[np.ndarray]]) -> RowCosts:
        columns = self._columns(read)
        begins = [columns[names[0]] for names in self.sequences]
        each, keys = truncated_tokens(
            self._lengths(columns), np.array([len(ids) for ids in begins[0]]), self.max_length, self.truncation_mode
        )
        if not self.sharing:
            return text_costs(each)
        for other in begins[1:]:
            each = each - np.minimum(shared_prefix_lengths(begins[0], other), keys)
        return prefix_costs(each, keys, *sort_by_prefix(begins[0]))


def _read(dataset: Dataset, name: str) -> list[np.ndarray]:
    return list(lists(dataset, name))


class PairMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of DPO."""

    sequences = (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids"))


class RewardMeasure(RowMeasure):
    """[`RowMeasure`] of the preference pairs of a reward model, whose prompt is a part of both sequences."""

    sequences = (("chosen_ids",), ("rejected_ids",))


class UnpairedMeasure(RowMeasure):
    """[`RowMeasure`] of prompts with one completion each, as KTO takes them."""

    sequences = (("prompt_ids", "completion_ids"),)


class TextMeasure(RowMeasure):
    """[`RowMeasure`] of texts."""

    sequences = (("input_ids",),)
