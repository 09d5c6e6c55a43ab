"""Checks rows of a dataset before the first step, and rows of a stream when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from .columns import chunks, values


__all__ = ["TRAINED", "check_row", "validate_rows"]

TRAINED = ("prompt", "chosen", "rejected", "completion", "text", "messages")
"""Columns that hold text or messages."""


def validate_rows(dataset: Dataset | IterableDataset, name: str, columns: Iterable[str]) -> Any:
    """
    Check that every row of the dataset `name` has text, or messages with a role, in each existing column of `columns`.

    Returns the dataset. Rows of a stream are checked when they are read.

    Raises:
        ValueError: For an invalid row.
    """
    columns = tuple(columns)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(partial(_is_checked, columns=columns, name=name))
    used = [column for column in columns if column in dataset.column_names] if isinstance(dataset, Dataset) else []
    for column in used:
        if not all(_is_valid(chunk, column) for chunk in chunks(dataset, column)):
            for number, value in enumerate(values(dataset, column)):
                check_row({column: value}, number, (column,), name)
    _check_joined({column: next(values(dataset, column), None) for column in used}, f"The {name} dataset has")
    return dataset


def _is_valid(chunk: pa.Array, column: str) -> bool:
    """Whether Arrow's types and null counts prove all rows valid: a fast test that mostly saves [`check_row`]."""
    if pa.types.is_string(chunk.type):
        return column != "messages" and not chunk.null_count
    if not pa.types.is_list(chunk.type) or chunk.null_count or not pa.types.is_struct(chunk.type.value_type):
        return False
    has_roles = "role" in {field.name for field in chunk.type.value_type} and not chunk.flatten().null_count
    return has_roles and pc.all(pc.greater(pc.list_value_length(chunk), 0)).as_py()


def _is_checked(row: dict[str, Any], columns: tuple[str, ...], name: str) -> bool:
    """A filter for streams that keeps every row, and raises the error of an invalid one."""
    check_row(row, None, columns, name)
    return True


def check_row(row: dict[str, Any], number: int | None, columns: Iterable[str] = TRAINED, of: str = "") -> None:
    """Raise a `ValueError` if a row has neither text nor messages in one of `columns`; `of`: its dataset."""
    which = "A row" if number is None else f"Row {number} (counted from 0)"
    where, remedy = f"{which}{of and f' of the {of} dataset'} has", "correct the row, or filter it out"
    for name in columns:
        if name not in row or (isinstance(row[name], str) and name != "messages"):
            continue
        value = row[name]
        expected = "a list of messages" if name == "messages" else "text or a list of messages"
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} {_short(value)} in column `{name}`, and {expected} is needed: {remedy}.")
        for message in value:
            if not isinstance(message, dict) or "role" not in message:
                has_other_keys = isinstance(message, dict) and "from" in message
                defect = "with the keys `from` and `value`, which TRL reads in a column `conversations` of SFT only"
                defect = defect if has_other_keys else 'without a `role` ("user" or "assistant", for instance)'
                raise ValueError(f"{where} the message {_short(message)} in column `{name}`, {defect}: {remedy}.")
    _check_joined(row, where)


def _check_joined(row: dict[str, Any], where: str) -> None:
    """Raise a `ValueError` if a row has text in one column and messages in another that TRL joins with it."""
    kinds = {type(row[name]): name for name in ("completion", "rejected", "chosen", "prompt") if row.get(name)}
    if {str, list} <= kinds.keys():
        raise ValueError(
            f"{where} text in column `{kinds[str]}` and messages in column `{kinds[list]}`, and TRL cannot join them. "
            'Write the text as messages (`[{"role": "user", "content": text}]`), or drop `prompt` if the messages of '
            "`chosen` and `rejected` begin with it."
        )


def _short(value: Any) -> str:
    """At most 100 characters of a value, for an error message."""
    text = json.dumps(value, default=repr, ensure_ascii=False) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 100 else text[:100] + " ..."
