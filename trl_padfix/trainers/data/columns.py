"""Facts about the columns of a dataset. Lists and images are read from Arrow, which decodes no image."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset


__all__ = [
    "blank_texts",
    "chunks",
    "count_equal",
    "empty_lists",
    "ids_outside",
    "image_counts",
    "list_lengths",
    "lists",
    "rows_of_only",
    "untrained_rows",
    "values",
]


def lists(dataset: Dataset, column: str) -> Iterator[np.ndarray]:
    """The list of numbers of each row in `column`; an empty one where there is none."""
    for numbers, bounds in _flat(dataset, column):
        yield from (numbers[begin:end] for begin, end in pairwise(bounds.tolist()))


def values(dataset: Dataset, column: str) -> Iterator[Any]:
    """The value of each row in `column`, decoded."""
    for batch in dataset.select_columns([column]).with_format(None).iter(1_000):
        yield from batch[column]


def list_lengths(dataset: Dataset, column: str) -> np.ndarray:
    """Length of each list of a column, `(n,)`; 0 where there is none."""
    lengths = [pc.fill_null(pc.list_value_length(chunk), 0).to_numpy() for chunk in chunks(dataset, column)]
    return np.concatenate([np.empty(0, dtype=np.int64), *lengths])


def image_counts(dataset: Dataset, column: str) -> np.ndarray:
    """Images of each row, `(n,)`: a column `image` has one or none, and any other a list of them."""
    if column != "image":
        return list_lengths(dataset, column)
    counts = [chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in chunks(dataset, column)]
    return np.concatenate([np.empty(0, dtype=np.int64), *counts])


def empty_lists(dataset: Dataset, column: str) -> np.ndarray:
    """Rows whose list in `column` is empty."""
    return np.flatnonzero(list_lengths(dataset, column) == 0)


def count_equal(dataset: Dataset, left: str, right: str) -> int:
    """Number of rows in which the lists of two columns are equal."""
    return sum(np.array_equal(a, b) for a, b in zip(lists(dataset, left), lists(dataset, right), strict=True))


def untrained_rows(dataset: Dataset, column: str = "labels") -> int:
    """Number of rows whose labels are -100 from the second on; the first token is never predicted."""
    return sum(bool((labels[1:] == -100).all()) for labels in lists(dataset, column))


def rows_of_only(dataset: Dataset, column: str, value: int) -> np.ndarray:
    """Rows whose list in `column` holds nothing but `value`."""
    return np.flatnonzero([(ids == value).all() for ids in lists(dataset, column)])


def blank_texts(dataset: Dataset, column: str) -> np.ndarray:
    """Rows whose text in `column` has no character but white space; none where the column holds no texts."""
    if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero([text is not None and not text.strip() for text in values(dataset, column)])


def ids_outside(dataset: Dataset, column: str, size: int, ignored: tuple[int, ...] = ()) -> tuple[int, int] | None:
    """The first row whose list in `column` holds a whole number that is neither in `range(size)` nor `ignored`."""
    kind = dataset.features.arrow_schema.field(column).type
    if not (hasattr(kind, "value_type") and pa.types.is_integer(kind.value_type)):
        return None
    first = 0
    for numbers, bounds in _flat(dataset, column):
        outside = ((numbers < 0) | (numbers >= size)) & ~np.isin(numbers, ignored)
        if outside.any():
            at = outside.argmax()
            return first + int(np.searchsorted(bounds, at, side="right")) - 1, int(numbers[at])
        first += len(bounds) - 1
    return None


def _flat(dataset: Dataset, column: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The numbers of many rows' lists one after the other, and where each list begins and the last one ends."""
    for chunk in chunks(dataset, column):
        lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
        yield pc.list_flatten(chunk).to_numpy(zero_copy_only=False), np.append(0, np.cumsum(lengths))


def chunks(dataset: Dataset, column: str) -> Iterator[pa.Array]:
    """The column as Arrow has it, some 10,000 rows at a time."""
    for table in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        yield from table[column].chunks
