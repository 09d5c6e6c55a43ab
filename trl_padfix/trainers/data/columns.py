"""Reads columns of a dataset. Lists and images are read as Arrow arrays, so that no image is decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from reprlib import repr as shortened
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset


__all__ = ["column_names", "lists", "needed_columns", "require_columns", "require_values"]

CHATS = "lists of messages ([{'role': ..., 'content': ...}])"

READ = {
    **dict.fromkeys(("chosen", "completion", "prompt", "rejected", "text"), f"only texts, or only {CHATS}"),
    "messages": f"{CHATS}, not their JSON, and keys 'from' and 'value' only in a column 'conversations'",
    "conversations": "lists of messages ([{'from': ..., 'value': ...}])",
    "label": "true or false",
}
"""What TRL reads in a column."""


def needed_columns(method: str, text_column: str = "text") -> tuple[list[set[str]], str]:
    """
    Sets of columns, of which the data of a training command must have one; and what needs them, for an error.

    A command checks local data before it imports torch, and so before any trainer. Of the sets that the data have, TRL
    reads the last one.
    """
    pairs, prompted = {"chosen", "rejected"}, "`chosen` and `rejected` (and `prompt`, unless both begin with it)"
    paired = [pairs, pairs | {"prompt"}]
    tokenized = [{"chosen_ids", "rejected_ids"}, {"chosen_input_ids", "rejected_input_ids"}]
    unpaired = "KTO needs `prompt`, `completion` and `label`, or pairs with `chosen` and `rejected`"
    texts = [{text_column}, {"messages"}, {"conversations"}, {"prompt", "completion"}, {"input_ids"}]
    return {
        "dpo": (paired, f"DPO needs {prompted}"),
        "reward": ([*paired, *tokenized], f"A reward model needs {prompted}"),
        "kto": ([{"prompt", "completion", "label"}, *paired], unpaired),
        "sft": (texts, f"SFT needs `{text_column}`, `messages`, `prompt` and `completion`, or `input_ids`"),
    }.get(method, ([{"prompt"}], "Completions are generated from `prompt`"))


def column_names(dataset: Dataset | IterableDataset) -> set[str]:
    """The columns of a dataset, also of a stream; an empty set without a dataset."""
    names = dataset.column_names if isinstance(dataset, Dataset | IterableDataset) else None  # a stream may not know
    first = names or next(iter(dataset or ()), ())
    if isinstance(first, Dataset | IterableDataset):
        raise TypeError("A list of datasets is given. Give one dataset, or for evaluation a dictionary of them.")
    return set(first)


def lists(dataset: Dataset, column: str) -> Iterator[np.ndarray]:
    """The list of numbers of each row in `column`; empty for a missing one."""
    # 10,000 rows at a time, so that a large column is never in memory at once.
    for table in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        batch = table[column]
        # From lengths, not from Arrow's own offsets: the offsets of a sliced chunk do not begin at 0. The length of a
        # missing list is null.
        lengths = pc.fill_null(pc.list_value_length(batch), 0).to_numpy()
        numbers, offsets = pc.list_flatten(batch).to_numpy(), np.append(0, np.cumsum(lengths)).tolist()
        yield from (numbers[begin:end] for begin, end in pairwise(offsets))


def require_columns(
    data: Dataset | IterableDataset | set[str], dataset_name: str, alternatives: list[set[str]], needs: str
) -> list[str]:
    """
    Raise a `ValueError` if a dataset, or a set of columns, lacks one of each of the `alternatives`.

    The error names the first. Of the last one that the data have, TRL reads the columns: their names are returned, and
    a dataset also needs a value in each row that [`require_values`] accepts.
    """
    columns = data if isinstance(data, set) else column_names(data)
    if columns and all(alternative - columns for alternative in alternatives):
        missing = sorted(alternatives[0] - columns)
        raise ValueError(
            f"The {dataset_name} dataset has no column {' and no column '.join(map(repr, missing))}; it has "
            f"{sorted(columns)}. {needs}: rename its columns, or map it to them."
        )
    read = sorted(next((alternative for alternative in reversed(alternatives) if alternative <= columns), ()))
    if isinstance(data, Dataset) and read:
        rows = data.select_columns(read)
        # Values of a column without null have one type, unless it is JSON.
        differ = any(c.null_count or isinstance(c.type, pa.BaseExtensionType) for c in rows.data.itercolumns())
        place = f"Row {{}} (counted from 0) of the {dataset_name} dataset"
        require_values((place.format(i), row) for i, row in enumerate(islice(rows, None if differ else 1)))
    return read


def require_values(rows: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """
    Raise a `ValueError` for the first value that TRL cannot read, in rows that come with their place for the error.

    The values of a row are texts, or they are lists of messages. If the first row has texts, TRL appends the EOS to
    each row, and so all need texts.
    """
    first = ""
    for place, row in rows:
        kinds = {first} if first == "text" else {"text", "chat"}
        for name, value in row.items():
            if value is None:
                raise ValueError(f"{place} has no {name!r}: {shortened(row)}. Write a value, or filter the row out.")
            if name not in READ or (name == "label" and isinstance(value, int | float)):
                continue
            if (kind := _kind(name, value)) not in kinds:
                raise ValueError(f"{place} has {shortened(value)} as {name!r}. TRL reads {READ[name]}.")
            kinds = {kind}
        first = first or min(kinds)


def _kind(name: str, value: Any) -> str | None:
    """`"text"` or `"chat"`, as TRL reads a value of a column; `None` if it reads neither."""
    key = "from" if name == "conversations" else "role"
    if isinstance(value, list) and any(isinstance(message, dict) and key in message for message in value[:1]):
        return "chat"
    return "text" if isinstance(value, str) and name not in ("messages", "conversations", "label") else None
