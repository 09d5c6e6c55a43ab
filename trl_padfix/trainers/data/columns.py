"""Facts about the columns of a dataset, computed by Arrow: looking at 200,000 rows takes a moment, not a loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset


__all__ = [
    "INSTEAD_OF_CONTENT",
    "blank_texts",
    "count_equal",
    "empty_lists",
    "first_misplaced_image",
    "ids_outside",
    "list_lengths",
    "may_lack_text",
    "rows_of_only",
    "untrained_rows",
]

INSTEAD_OF_CONTENT = ("tool_calls", "thinking", "reasoning_content")
"""What a message may have in place of its content."""


def list_lengths(dataset: Dataset, column: str) -> np.ndarray:
    """Length of each list of a column, `(n,)`; 0 where there is none."""
    lengths = [pc.fill_null(pc.list_value_length(table[column]), 0).to_numpy() for table in _tables(dataset, column)]
    return np.concatenate([np.empty(0, dtype=np.int64), *lengths])


def empty_lists(dataset: Dataset, column: str) -> np.ndarray:
    """Rows whose list in `column` is empty."""
    return np.flatnonzero(list_lengths(dataset, column) == 0)


def count_equal(dataset: Dataset, left: str, right: str) -> int:
    """Number of rows in which the lists of two columns are equal."""
    count = 0
    for table in _tables(dataset, left, right):
        columns = [_array(table, name) for name in (left, right)]
        alike = pc.equal(*(pc.list_value_length(column) for column in columns))
        columns = [column.filter(alike) for column in columns]
        lengths = pc.list_value_length(columns[0]).to_numpy(zero_copy_only=False)
        differs = np.not_equal(*(pc.list_flatten(c).to_numpy(zero_copy_only=False) for c in columns))
        count += len(lengths) - int(_any(differs, lengths).sum())
    return count


def untrained_rows(dataset: Dataset, column: str = "labels") -> int:
    """Number of rows whose labels are -100 from the second on; the first token is never predicted."""
    count = 0
    for table in _tables(dataset, column):
        labels = _array(table, column)
        lengths = pc.list_value_length(labels).to_numpy(zero_copy_only=False)
        trained = pc.list_flatten(labels).to_numpy(zero_copy_only=False) != -100
        trained[(np.cumsum(lengths) - lengths)[lengths > 0]] = False
        count += len(lengths) - int(_any(trained, lengths).sum())
    return count


def rows_of_only(dataset: Dataset, column: str, value: int) -> np.ndarray:
    """Rows whose list in `column` holds nothing but `value`."""
    found = []
    for table in _tables(dataset, column):
        ids = _array(table, column)
        lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
        found.append(~_any(pc.list_flatten(ids).to_numpy(zero_copy_only=False) != value, lengths))
    return np.flatnonzero(np.concatenate([np.empty(0, dtype=bool), *found]))


def blank_texts(dataset: Dataset, column: str) -> np.ndarray:
    """Rows whose text in `column` has no character but white space; none where the column is no text."""
    if getattr(dataset.features[column], "dtype", None) not in ("string", "large_string"):
        return np.empty(0, dtype=np.int64)
    blank = [pc.equal(pc.utf8_trim_whitespace(table[column]), "").to_numpy() for table in _tables(dataset, column)]
    return np.flatnonzero(np.concatenate([np.empty(0, dtype=bool), *blank]))


def may_lack_text(dataset: Dataset, column: str) -> bool:
    """
    Whether a row of `column` may be neither a text nor a list of messages that have a role and a content.

    Sure to be told if there is such a row; columns of other types, and of messages with parts, are left to the caller.
    """
    return any(_lacks_text(table[column]) for table in _tables(dataset, column))


def _lacks_text(column: pa.ChunkedArray) -> bool:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.null_count > 0
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) or column.null_count:
        return True
    if pc.min(pc.list_value_length(column)).as_py() == 0 or not pa.types.is_struct(column.type.value_type):
        return True
    messages = pc.list_flatten(column)
    fields = {field.name: field.type for field in column.type.value_type}
    if messages.null_count or not {"role", "content"} <= fields.keys() or not pa.types.is_string(fields["role"]):
        return True
    if any(pc.struct_field(messages, name).null_count for name in ("role", "content")):
        return True
    return not (pa.types.is_string(fields["content"]) or pa.types.is_list(fields["content"]))


def ids_outside(dataset: Dataset, column: str, size: int, ignored: int | None = None) -> tuple[int, int] | None:
    """The first row whose list in `column` holds a number below 0 or from `size` on, but for `ignored`; and it."""
    first = 0
    for table in _tables(dataset, column):
        ids = _array(table, column)
        if not (pa.types.is_list(ids.type) or pa.types.is_large_list(ids.type)):
            return None
        if not pa.types.is_integer(ids.type.value_type):
            return None
        values = pc.list_flatten(ids).to_numpy(zero_copy_only=False)
        wrong = (values < 0) | (values >= size)
        if ignored is not None:
            wrong &= values != ignored
        if wrong.any():
            at = int(wrong.argmax())
            return first + int(pc.list_parent_indices(ids)[at].as_py()), int(values[at])
        first += len(table)
    return None


def first_misplaced_image(
    dataset: Dataset, images: str, text: str, placeholder: str | None
) -> tuple[int, int, int] | None:
    """
    The first row with other images than its text has placeholders for, without decoding an image.

    Args:
        dataset (`Dataset`):
            With images and text.
        images (`str`):
            Column of lists of images, or of one image each if it is called `"image"`.
        text (`str`):
            Column of texts, or of messages whose content is text or a list of parts.
        placeholder (`str`, *optional*):
            The token that stands for an image in a text.

    Returns:
        `tuple[int, int, int]`, *optional*: row, number of images, number of placeholders.

    Raises:
        TypeError: If the messages are of another form.
    """
    first = 0
    for table in _tables(dataset, images, text):
        column, words = _array(table, images), _array(table, text)
        given = pc.is_valid(column).cast("int64") if images == "image" else pc.list_value_length(column)
        given = pc.fill_null(given, 0).to_numpy(zero_copy_only=False)
        wanted = _placeholders(words, given, placeholder)
        wrong = np.flatnonzero(wanted != given)
        if len(wrong):
            return first + int(wrong[0]), int(given[wrong[0]]), int(wanted[wrong[0]])
        first += len(table)
    return None


def _placeholders(words: pa.Array, given: np.ndarray, placeholder: str | None) -> np.ndarray:
    if pa.types.is_string(words.type) or pa.types.is_large_string(words.type):
        if placeholder is None:
            return given
        counts = pc.fill_null(pc.count_substring(words, placeholder), 0).to_numpy(zero_copy_only=False)
        return np.where(pc.equal(words, "").to_numpy(zero_copy_only=False), given, counts)
    messages = pc.list_flatten(words) if pa.types.is_list(words.type) or pa.types.is_large_list(words.type) else None
    if messages is None or not pa.types.is_struct(messages.type) or messages.type.get_field_index("content") < 0:
        raise TypeError(f"messages of type {words.type}")
    row = pc.list_parent_indices(words).to_numpy(zero_copy_only=False)
    role, content = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    if pa.types.is_string(content.type) or pa.types.is_large_string(content.type):
        # Before the first plain text of the user TRL puts all images.
        users = pc.and_(pc.equal(role, "user"), pc.is_valid(content)).to_numpy(zero_copy_only=False)
        plain = np.bincount(row[users], minlength=len(words)) > 0
        return np.where(plain | (np.bincount(row, minlength=len(words)) == 0), given, 0)
    parts = pc.list_flatten(content)
    if not pa.types.is_struct(parts.type) or parts.type.get_field_index("type") < 0:
        raise TypeError(f"message contents of type {content.type}")
    message = pc.list_parent_indices(content).to_numpy(zero_copy_only=False)
    shown = pc.equal(pc.struct_field(parts, "type"), "image").to_numpy(zero_copy_only=False).astype(bool)
    shown &= ~pc.equal(role, "tool").to_numpy(zero_copy_only=False).astype(bool)[message]
    wanted = np.bincount(row[message[shown]], minlength=len(words))
    return np.where(np.bincount(row, minlength=len(words)) == 0, given, wanted)


def _tables(dataset: Dataset, *columns: str) -> Iterator[pa.Table]:
    return dataset.select_columns(list(dict.fromkeys(columns))).with_format("arrow").iter(10_000)


def _array(table: pa.Table, column: str) -> pa.Array:
    return pa.concat_arrays(table[column].chunks) if table[column].num_chunks != 1 else table[column].chunk(0)


def _any(flags: np.ndarray, lengths: Any) -> np.ndarray:
    """Whether any flag of each row is set; the flags of `lengths[0]` belong to the first row, and so on."""
    found = np.zeros(len(lengths), dtype=bool)
    filled = np.flatnonzero(lengths)
    if len(filled):
        found[filled] = np.logical_or.reduceat(flags, (np.cumsum(lengths) - lengths)[filled])
    return found
