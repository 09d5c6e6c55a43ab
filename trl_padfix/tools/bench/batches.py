"""Division of the rows of a benchmark into the batches of a variant."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import trl
from datasets import Dataset

from ...trainers.batching.prefix_groups import group_rows


if TYPE_CHECKING:
    from .settings import Variant
    from .steps import BenchStep

__all__ = ["Batches", "divide_rows", "in_parts"]

T = TypeVar("T")

Batches = list[list[int]]
"""Rows of each batch, as indices into the prepared rows of a step."""


def divide_rows(step: BenchStep, variant: Variant, counted: Batches) -> Batches:
    """Divide the counted rows into the batches of a variant."""
    settings = step.settings
    if variant.has_trls_batches:
        return counted
    rows = [i for batch in counted for i in batch]
    if variant.batching == "packed":
        packed = _packed_by_trl([len(step.rows[i]["input_ids"]) for i in rows], settings.max_length)
        # As many packed rows in a batch as give TRL's number of batches.
        packed_batches = in_parts(packed, max(1, len(packed) // len(counted)))
        batches = [[rows[i] for packed_row in batch for i in packed_row] for batch in packed_batches]
    elif variant.batching == "grouped":
        longest = settings.measure().longest([step.rows[i] for i in rows])
        batches = in_parts([rows[i] for i in (-longest).argsort(kind="stable")], settings.pairs)
    else:
        costs = settings.measure(sharing=bool(variant.shares)).costs([step.rows[i] for i in rows])
        parts = in_parts(group_rows(range(len(rows)), costs, settings.pairs).tolist(), settings.pairs)
        batches = [[rows[i] for i in part] for part in parts]
    # Sorted by length or prefix, the first batches would be the largest while the machine warms up.
    random.Random(settings.seed).shuffle(batches)
    return batches


def in_parts(items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _packed_by_trl(lengths: list[int], max_length: int) -> Batches:
    """Indices of the rows that TRL's `packing=True` concatenates to each row of at most `max_length` tokens."""
    # TRL returns ids only. With the index of its row as each id, the first id of each sequence names the row.
    numbered = Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    packed = trl.pack_dataset(numbered, max_length)
    result = []
    for ids, lengths_in_row in zip(packed["input_ids"], packed["seq_lengths"], strict=True):
        starts = [0, *accumulate(lengths_in_row)][:-1]
        result.append([ids[start] for start in starts])
    return result
