"""Load rows from a file, a folder or the Hub, and read their texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from ..files import DATA_FILES
from ..trainers.data.row_checks import TRAINED, check_row


__all__ = ["load_rows", "texts_of", "texts_of_row"]


def load_rows(data: str) -> Dataset:
    """
    Load the training split of a local `.jsonl`, `.json`, `.json.gz`, `.csv` or `.parquet`, a folder, or a Hub id.

    Raises:
        ValueError: If there is no row.
    """
    path = Path(data)
    files = [path] if path.is_file() else path.glob("*") if path.is_dir() else []
    for file in files:  # `datasets` fails on an empty file with an error about schemas
        if file.suffix in DATA_FILES and not file.stat().st_size:
            raise ValueError(f"{file} is empty.")
    if path.is_file() and path.suffix in DATA_FILES:
        rows = load_dataset(DATA_FILES[path.suffix], data_files=data, split="train")
    else:
        rows = load_dataset(data, split="train")
    if not len(rows):
        raise ValueError(f"{data} has no row in its split 'train'.")
    return rows


def checked_rows(dataset: Dataset, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """
    Yield the rows of a dataset from `start` to `stop`.

    Raises:
        ValueError: If a row has no text, see [`check_row`].
    """
    for number in range(start, len(dataset) if stop is None else min(stop, len(dataset))):
        row = dataset[number]
        check_row(row, number)
        yield row


def texts_of_row(row: dict[str, Any]) -> Iterator[str]:
    """All text of a row, plain or conversational."""
    for value in (row[name] for name in TRAINED if name in row):
        for message in [{"content": value}] if isinstance(value, str) else value:
            content = message.get("content") or ""
            yield from [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
            yield from (json.dumps(call) for call in message.get("tool_calls") or ())


def texts_of(dataset: Dataset) -> Iterator[str]:
    """All text of a dataset, plain or conversational, to train a tokenizer on."""
    names = [name for name in dataset.column_names if name in TRAINED]
    for row in checked_rows(dataset.select_columns(names)):
        yield from texts_of_row(row)
