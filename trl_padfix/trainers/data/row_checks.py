"""Rows that cannot be trained on: found before the first step, or counted and left out of a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from datasets import Dataset, IterableDataset

from .columns import ids_outside, values


__all__ = ["TRAINED", "check_ids", "check_row", "image_token_ids", "sound_rows"]

logger = logging.getLogger(__name__)

TRAINED = ("prompt", "chosen", "rejected", "completion", "text", "messages")
"""Columns with text or messages."""

INSTEAD_OF_CONTENT = ("tool_calls", "thinking", "reasoning_content")
"""What a message may have in place of its content."""


def sound_rows(dataset: Any, name: str, columns: Iterable[str]) -> Any:
    """
    A dataset in which every row has text, or messages with text, in the columns that are trained on.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Rows as they are given to a trainer.
        name (`str`):
            What the dataset is for, for the messages.
        columns (`Iterable[str]`):
            The columns that are trained on, as far as the dataset has them.

    Returns:
        The dataset. A stream comes back without rows that are not sound: they are counted when they come up, and
        warned about at the 1st, 10th, 100th, ...

    Raises:
        ValueError: If a row of a dataset that is not a stream is not sound.
    """
    columns = tuple(columns)
    if isinstance(dataset, Dataset):
        for column in columns:
            if column in dataset.column_names:
                for number, value in enumerate(values(dataset, column)):
                    check_row({column: value}, number, (column,), name)
    elif isinstance(dataset, IterableDataset):
        return dataset.filter(SoundRow(name, columns))
    return dataset


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
    """
    Raises:
        ValueError: If a row of a dataset that is not a stream holds a token id that the model has no embedding for.
    """
    if not isinstance(dataset, Dataset):
        return
    for column in dataset.column_names:
        if not (column.endswith("_ids") or column == "labels"):
            continue
        found = ids_outside(dataset, column, size, ignored=-100 if column == "labels" else None)
        if found is not None:
            row, value = found
            raise ValueError(
                f"Row {row} (counted from 0) of the {name} dataset holds {value} in `{column}`, and the model has "
                f"embeddings for 0 to {size - 1}: the run would stop when the row comes up (on a GPU with a device "
                "assertion). Tokenize with the model's own tokenizer, or correct the row."
            )


def image_token_ids(config: Any) -> frozenset[int]:
    """The ids that stand for images, videos and sounds, by a model's configuration; some lie beyond its embeddings."""
    named = {k: v for k, v in config.to_dict().items() if "token" in k and isinstance(v, int)}
    return frozenset(v for k, v in named.items() if not k.startswith(_TEXT_TOKENS) and "per_" not in k)


_TEXT_TOKENS = ("bos_", "eos_", "pad_", "sep_", "unk_", "cls_", "mask_", "decoder_start_", "num_", "max_", "forced_")
"""Beginnings of settings that name a token of text, or a number of tokens."""


def check_row(row: dict[str, Any], number: int | None, columns: Iterable[str] = TRAINED, of: str = "") -> None:
    """
    Check that a row has text, or messages with text, in every column that is trained on.

    Args:
        row (`dict`):
            A row of a dataset.
        number (`int`, *optional*):
            Its number in the dataset, counted from 0, if that is known.
        columns (`Iterable[str]`, *optional*):
            The columns that are trained on; those that the row does not have are not asked for.
        of (`str`, *optional*):
            Name of the dataset.

    Raises:
        ValueError: If a column has something else; with the row, the column and the value.

    Example:

    ```python
    >>> from trl_padfix.trainers.data.row_checks import check_row

    >>> check_row({"prompt": "Two and two?", "chosen": None}, 7)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Row 7 (counted from 0) has None in column `chosen`, and text or a list of messages is needed: ...

    ```
    """
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
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f'{where} the message {_short(message)} in column `{name}`, without a text `role` ("user" or '
                    f'"assistant", for instance): {remedy}.'
                )
            content = message.get("content")
            if content is None and any(message.get(part) for part in INSTEAD_OF_CONTENT):
                continue
            if not isinstance(content, (str, list)):
                raise ValueError(
                    f"{where} the message {_short(message)} in column `{name}`, whose `content` is no text: {remedy}."
                )


def _short(value: Any) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=False) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 100 else text[:100] + " ..."
