"""Rows that cannot be trained on: found before the first step, or counted and left out of a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from .columns import chunks, ids_outside, values


__all__ = ["TRAINED", "check_ids", "check_row", "image_token_ids", "sound_rows"]

logger = logging.getLogger(__name__)

TRAINED = ("prompt", "chosen", "rejected", "completion", "text", "messages")
"""Columns with text or messages."""

INSTEAD_OF_CONTENT = ("tool_calls", "thinking", "reasoning_content")
"""What a message may have in place of its content."""


def sound_rows(dataset: Any, name: str, columns: Iterable[str]) -> Any:
    """
    The dataset `name`, of which every row has text, or messages with text, in those of the `columns` that there are;
    a stream without the rows that have none, which are counted and warned about when they come up.
    """
    columns = tuple(columns)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(SoundRow(name, columns))
    for column in columns if isinstance(dataset, Dataset) else ():
        if column not in dataset.column_names or all(_sound(chunk, column) for chunk in chunks(dataset, column)):
            continue
        for number, value in enumerate(values(dataset, column)):
            check_row({column: value}, number, (column,), name)
    return dataset


def _sound(chunk: pa.Array, column: str) -> bool:
    """Whether Arrow can tell that [`check_row`] finds nothing in these rows, which takes no time."""
    if pa.types.is_string(chunk.type):
        return column != "messages" and not chunk.null_count
    if not pa.types.is_list(chunk.type) or chunk.null_count or not pa.types.is_struct(chunk.type.value_type):
        return False
    messages = chunk.flatten()
    if messages.null_count or not {"role", "content"} <= {field.name for field in chunk.type.value_type}:
        return False
    role, content = messages.field("role"), messages.field("content")
    are_texts = pa.types.is_string(role.type) and (pa.types.is_string(content.type) or pa.types.is_list(content.type))
    no_row_is_empty = pc.all(pc.greater(pc.list_value_length(chunk), 0)).as_py()
    return are_texts and not role.null_count and not content.null_count and no_row_is_empty


class SoundRow:
    """Whether a row of a stream can be trained on, by its `columns`; counts and names those that cannot."""

    def __init__(self, name: str, columns: tuple[str, ...]):
        self.name, self.columns, self.left_out = name, columns, 0

    def __call__(self, row: dict[str, Any]) -> bool:
        try:
            check_row(row, None, self.columns, self.name)
        except ValueError as error:
            self.left_out += 1
            if worth_a_warning(self.left_out):
                logger.warning(f"So far {self.left_out} rows of the {self.name} stream were left out. {error}")
            return False
        return True


def worth_a_warning(count: int, added: int = 1) -> bool:
    """Whether the 1st, 10th, 100th, ... of what is counted is among the last `added`."""
    before = count - added
    return before == 0 or len(str(before)) < len(str(count))


def check_ids(dataset: Any, name: str, size: int) -> None:
    """Raise a `ValueError` if a row of a dataset, no stream, holds a token id that the model has no embedding for."""
    for column in dataset.column_names if isinstance(dataset, Dataset) else ():
        is_labels = column == "labels"
        if not column.endswith("_ids") and not is_labels:
            continue
        if found := ids_outside(dataset, column, size, ignored=(-100,) if is_labels else ()):
            raise ValueError(
                f"Row {found[0]} (counted from 0) of the {name} dataset holds {found[1]} in `{column}`, and the "
                f"model has embeddings for 0 to {size - 1}: the run would stop when the row comes up (on a GPU with a "
                "device assertion). Tokenize with the model's own tokenizer, or correct the row."
            )


def image_token_ids(config: Any) -> frozenset[int]:
    """The ids that stand for images, videos and sounds, by a model's configuration; some lie beyond its embeddings."""
    named = {k: v for k, v in config.to_dict().items() if "token" in k and isinstance(v, int)}
    return frozenset(v for k, v in named.items() if not k.startswith(_TEXT_TOKENS) and "per_" not in k)


_TEXT_TOKENS = ("bos_", "eos_", "pad_", "sep_", "unk_", "cls_", "mask_", "decoder_start_", "num_", "max_", "forced_")
"""Beginnings of settings that name a token of text, or a number of tokens."""


def check_row(row: dict[str, Any], number: int | None, columns: Iterable[str] = TRAINED, of: str = "") -> None:
    """Raise a `ValueError` if one of the `columns` of a row has no text and no messages with text; `of` a dataset."""
    which = "A row" if number is None else f"Row {number} (counted from 0)"
    where = f"{which}{of and f' of the {of} dataset'} has"
    remedy = "correct the row, or filter it out"
    for name in (column for column in columns if column in row):
        value = row[name]
        if isinstance(value, str) and name != "messages":
            continue
        needed = "a list of messages" if name == "messages" else "text or a list of messages"
        if not isinstance(value, list) or not value:
            raise ValueError(f"{where} {_short(value)} in column `{name}`, and {needed} is needed: {remedy}.")
        for message in value:
            if lack := _lack(message):
                raise ValueError(f"{where} the message {_short(message)} in column `{name}`, {lack}: {remedy}.")


def _lack(message: Any) -> str | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return 'without a text `role` ("user" or "assistant", for instance)'
    content = message.get("content")
    instead = content is None and any(message.get(part) for part in INSTEAD_OF_CONTENT)
    return None if instead or isinstance(content, (str, list)) else "whose `content` is no text"


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=False) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 100 else text[:100] + " ..."
