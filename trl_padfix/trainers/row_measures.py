"""Token costs of the rows of tokenized data, for [`~trl_padfix.trainers.row_costs`]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from datasets import Dataset

from .columns import list_lengths
from .row_costs import RowCosts, pair_costs, text_costs


__all__ = ["PairMeasure", "TextMeasure"]


@dataclass(frozen=True)
class PairMeasure:
    """Token costs of tokenized preference pairs, given as examples or as a dataset."""

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    sharing: bool = False

    def examples(self, examples: list[dict[str, Any]]) -> RowCosts:
        lengths = [[len(e[name]) for e in examples] for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        return self._costs(lengths, _numbers(tuple(e["prompt_ids"]) for e in examples))

    def dataset(self, dataset: Dataset) -> RowCosts:
        lengths = [list_lengths(dataset, name) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        return self._costs(lengths, _numbers(_contents(dataset, "prompt_ids")) if self.sharing else None)

    def _costs(self, lengths: list[Any], prompts: list[int] | None) -> RowCosts:
        return pair_costs(
            *lengths,
            prompts=prompts if self.sharing else None,
            max_length=self.max_length,
            truncation_mode=self.truncation_mode,
        )


@dataclass(frozen=True)
class TextMeasure:
    """Token costs of tokenized texts, given as examples or as a dataset."""

    max_length: int | None = None

    def examples(self, examples: list[dict[str, Any]]) -> RowCosts:
        return text_costs([len(e["input_ids"]) for e in examples], max_length=self.max_length)

    def dataset(self, dataset: Dataset) -> RowCosts:
        return text_costs(list_lengths(dataset, "input_ids"), max_length=self.max_length)


def _numbers(keys: Any) -> list[int]:
    """Equal keys by one number."""
    known: dict[Any, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]


def _contents(dataset: Dataset, column: str) -> Iterator[bytes]:
    """The token ids of each row, as something to compare."""
    for table in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        for chunk in table[column].chunks:
            offsets, ids = chunk.offsets.to_numpy(), chunk.values.to_numpy()
            yield from (ids[a:b].tobytes() for a, b in pairwise(offsets))
