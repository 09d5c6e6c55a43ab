"""Checks rows of a dataset before the first step; leaves invalid rows of a stream out, and counts them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from .columns import chunks, ids_outside, values
from .data_warnings import count_and_warn, name_rows, warn_or_raise


__all__ = ["TRAINED", "EmptyTextError", "check_ids", "check_row", "validate_rows"]

TRAINED = ("prompt", "chosen", "rejected", "completion", "text", "messages")
"""Columns that hold text or messages."""

INSTEAD_OF_CONTENT = ("tool_calls", "thinking", "reasoning_content")
"""Keys that a message may have in place of its content."""


class DoubtfulRowError(ValueError):
    """A row whose messages a chat template may render, though one lacks its role or its content."""


class EmptyTextError(DoubtfulRowError):
    """A row with a prompt and an empty text; TRL adds an EOS token to the text."""


def validate_rows(dataset: Dataset | IterableDataset, name: str, columns: Iterable[str], strict: bool = True) -> Any:
    """
    Check that every row of the dataset `name` has text, or messages with text, in each existing column of `columns`.

    Returns the dataset. Warns about doubtful rows, which a chat template may render. Rows of a stream are checked when
    they are read: invalid ones are left out and counted in a warning, doubtful ones are kept.

    Raises:
        ValueError: For an invalid row of a dataset; with `strict` for every row that is invalid or doubtful.
    """
    columns = tuple(columns)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(ValidRow(name, columns, strict))
    if not isinstance(dataset, Dataset):
        return dataset
    for column in columns:
        if column not in dataset.column_names or all(_is_valid(chunk, column) for chunk in chunks(dataset, column)):
            continue
        doubtful: dict[int, DoubtfulRowError] = {}
        for number, value in enumerate(values(dataset, column)):
            try:
                check_row({column: value}, number, (column,), name)
            except DoubtfulRowError as error:
                doubtful[number] = error
        if doubtful:
            rows = [*doubtful]
            count = f" {name_rows(rows)} are like this." if len(rows) > 1 else ""
            warn_or_raise(f"{doubtful[rows[0]]}{count}", strict)
    return dataset


def _is_valid(chunk: pa.Array, column: str) -> bool:
    """Whether Arrow's types and null counts prove all rows valid: a fast test that mostly saves [`check_row`]."""
    if pa.types.is_string(chunk.type):
        is_full = column == "prompt" or not pc.any(pc.equal(chunk, "")).as_py()
        return column != "messages" and not chunk.null_count and is_full
    if not pa.types.is_list(chunk.type) or chunk.null_count or not pa.types.is_struct(chunk.type.value_type):
        return False
    messages = chunk.flatten()
    if messages.null_count or not {"role", "content"} <= {field.name for field in chunk.type.value_type}:
        return False
    role, content = messages.field("role"), messages.field("content")
    are_texts = pa.types.is_string(role.type) and (pa.types.is_string(content.type) or pa.types.is_list(content.type))
    no_row_is_empty = pc.all(pc.greater(pc.list_value_length(chunk), 0)).as_py()
    return are_texts and not role.null_count and not content.null_count and no_row_is_empty


class ValidRow:
    """A filter for streams: whether a row can be trained on. Counts invalid and doubtful rows, and warns of them."""

    def __init__(self, name: str, columns: tuple[str, ...], strict: bool = False):
        self.name, self.columns, self.strict = name, columns, strict
        self.counts: Counter[str] = Counter()

    def __call__(self, row: dict[str, Any]) -> bool:
        try:
            check_row(row, None, self.columns, self.name)
        except ValueError as error:
            if self.strict:
                raise
            is_kept = isinstance(error, DoubtfulRowError)
            treatment = "are doubtful" if is_kept else "were left out"
            count_and_warn(self.counts, f"rows of the {self.name} stream {treatment}", example=str(error))
            return is_kept
        return True


def check_ids(dataset: Dataset | IterableDataset, name: str, size: int, used: Iterable[str]) -> None:
    """
    Raise a `ValueError` if a row of a dataset (not a stream) holds a token id without an embedding in the model.

    `used` are the columns that training reads.
    """
    if not isinstance(dataset, Dataset):
        return
    for column in dataset.column_names:
        holds_ids = column.endswith("_ids") or column == "labels"
        if not holds_ids or column not in used:
            continue
        if outside := ids_outside(dataset, column, size, ignored=(-100,) if column == "labels" else ()):
            row, value = outside
            raise ValueError(
                f"Row {row} (counted from 0) of the {name} dataset holds {value} in `{column}`, and the "
                f"model has embeddings for 0 to {size - 1}: the run would stop when the row comes up (on a GPU with a "
                "device assertion). Tokenize with the model's own tokenizer, or correct the row."
            )


def check_row(row: dict[str, Any], number: int | None, columns: Iterable[str] = TRAINED, of: str = "") -> None:
    """Raise a `ValueError` if a row has neither text nor messages with text in one of `columns`; `of`: its dataset."""
    which = "A row" if number is None else f"Row {number} (counted from 0)"
    columns, where = tuple(columns), f"{which}{of and f' of the {of} dataset'} has"
    remedy = "correct the row, or filter it out"
    for name in columns:
        if name not in row or (isinstance(row[name], str) and name != "messages"):
            continue
        value = row[name]
        expected = "a list of messages" if name == "messages" else "text or a list of messages"
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} {_short(value)} in column `{name}`, and {expected} is needed: {remedy}.")
        for message in value:
            if defect := _defect(message):
                kind = DoubtfulRowError if isinstance(message, dict) and "role" in message else ValueError
                raise kind(f"{where} the message {_short(message)} in column `{name}`, {defect}: {remedy}.")
    for name in columns:
        if name != "prompt" and row.get(name) == "":
            raise EmptyTextError(
                f"{where} an empty text in column `{name}`, and only its EOS token is trained on: {remedy}."
            )


def _defect(message: Any) -> str | None:
    """Why a message is invalid; `None` if it is valid."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        return "with the keys `from` and `value`, which TRL reads in a column `conversations` of SFT only"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return 'without a text `role` ("user" or "assistant", for instance)'
    content = message.get("content")
    has_replacement = content is None and any(message.get(part) for part in INSTEAD_OF_CONTENT)
    return None if has_replacement or isinstance(content, (str, list)) else "whose `content` is not text"


def _short(value: Any) -> str:
    """At most 100 characters of a value, for an error message."""
    text = json.dumps(value, default=repr, ensure_ascii=False) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 100 else text[:100] + " ..."
