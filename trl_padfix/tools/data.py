"""Load rows from a file, a folder, the Hub or a recipe, and check them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from datasets import Dataset, load_dataset

from ..files import is_missing_path
from ..trainers.data.row_checks import TRAINED, EmptyTextError, check_row
from .formats import TEXT_ADVICE, rename_message_keys
from .reading import reading


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "checked_rows", "give_template", "load_recipe", "load_rows", "rename_columns", "texts_of",
    "texts_of_row", "whole_number",
]  # fmt: skip

_ADVICE = (
    "Give JSON lines (one object in each line), JSON, either of them gzipped under a name that ends with `.gz`, "
    "Parquet, a folder of these, or the id of a Hub dataset."
)

_FILES = {".gz", ".json", ".jsonl", ".parquet"}


def load_rows(data: str, split: str = "train") -> Dataset:
    """
    Load a dataset.

    Args:
        data (`str`):
            A local `.jsonl`, `.json`, `.json.gz` or `.parquet`, a folder, a Hub id, or the YAML of a recipe.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a folder or Hub id; a file has one split.

    Raises:
        FileNotFoundError: If `data` looks like a local file that does not exist.
        ValueError: If it is no dataset, has no such split, or no row.
    """
    rows = _load(data, split)
    if not len(rows):
        raise ValueError(f"{data} has no row in its split {split!r}: check the file, its split or its filter.")
    return rows


def _load(data: str, split: str) -> Dataset:
    path = Path(data)
    if path.suffix in {*_FILES, ".yaml", ".yml"} and not path.exists():
        raise FileNotFoundError(f"There is no file {data}. Give a local file, or the id of a Hub dataset.")
    if path.suffix in (".yaml", ".yml"):
        return _of_recipe(load_recipe(data), data, split)
    if path.suffix in _FILES:
        if path.is_dir():
            raise ValueError(f"{data} is a folder with the name of a file: give a file, or a folder of another name.")
        if not path.stat().st_size:  # `datasets` fails on an empty file with an error about schemas
            raise ValueError(f"{data} is empty: it has no row.")
        with reading(f"the data {data!r}", _ADVICE):
            return load_dataset("parquet" if path.suffix == ".parquet" else "json", data_files=data, split="train")
    if is_missing_path(data):  # `datasets` would look for it on the Hub
        raise FileNotFoundError(
            f"The data {data!r} cannot be read: there is no such file or folder here ({Path.cwd()})."
        )
    with reading(f"the data {data!r}", _ADVICE):
        return load_dataset(data, split=split)


def rename_columns(rows: Dataset, columns: str | None) -> Dataset:
    """
    Rename columns, as in `"question=prompt,answer=completion"`, and keys of messages (`"speaker=role,text=content"`).

    A column that already has a new name is dropped.
    """
    if columns is None:
        return rows
    pairs = [part.split("=") for part in columns.split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ValueError(f"{columns!r} is no mapping of columns: write `question=prompt,answer=completion`.")
    names = {old.strip(): new.strip() for old, new in pairs}
    in_messages = {old: names.pop(old) for old in names.keys() - set(rows.column_names)}
    rows = rename_message_keys(rows, in_messages)
    # `&` binds weaker than `-`: columns with a new name, unless they are renamed themselves, as in a swap.
    replaced = set(names.values()) & set(rows.column_names) - names.keys()
    return rows.remove_columns(sorted(replaced)).rename_columns(names)


def load_recipe(path: str) -> dict[str, Any]:
    """The fields of a recipe; raises an [`UnreadableError`] if the file is no YAML."""
    with Path(path).open("rb") as file, reading(f"the YAML {path!r}", "Correct the file."):
        recipe = yaml.safe_load(file)
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} holds a {type(recipe).__name__}, and a recipe is a mapping of fields to values.")
    return recipe


def whole_number(recipe: dict[str, Any], name: str, default: int | None, at_least: int = 1) -> int | None:
    """
    A whole number of a recipe; raises a `ValueError` if the field holds anything else.

    A `max_length` of null gives 0, which stands for any length.
    """
    value = recipe.get(name, default)
    if value is None:
        return 0 if name == "max_length" else default
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:  # `True` is an `int`
        raise ValueError(f"`{name}` of the YAML is {value!r}, and a whole number of {at_least} or more is needed.")
    return value


def _of_recipe(recipe: dict[str, Any], path: str, split: str) -> Dataset:
    import trl

    split = recipe.get("dataset_train_split", split)
    if recipe.get("datasets"):
        names = trl.DatasetMixtureConfig.__dataclass_fields__
        with reading(f"the data that {path!r} lists in `datasets`", _ADVICE):
            splits = trl.get_dataset(trl.DatasetMixtureConfig(**{k: v for k, v in recipe.items() if k in names}))
    elif recipe.get("dataset_name"):
        with reading(f"the data {recipe['dataset_name']!r} of {path!r}", _ADVICE):
            return load_dataset(recipe["dataset_name"], name=recipe.get("dataset_config"), split=split)
    else:
        raise ValueError(f"{path} names no data: a recipe has `dataset_name`, or a list `datasets`.")
    if split not in splits:
        raise ValueError(f"{path} has no split {split!r}; it has {', '.join(splits)}.")
    return splits[split]


def give_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Give a tokenizer without a chat template a plain one (roles, contents, EOS); returns whether it did."""
    from .tiny import CHAT_TEMPLATE, EOS, START

    if tokenizer.chat_template is not None:
        return False
    tokenizer.chat_template = CHAT_TEMPLATE.replace(START, "").replace(EOS, str(tokenizer.eos_token or ""))
    return True


def checked_rows(dataset: Dataset, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """
    Yield the rows of a dataset from `start` to `stop`.

    Raises:
        ValueError: If a row has no text, see [`check_row`], or cannot be decoded.
    """
    for number in range(start, len(dataset) if stop is None else min(stop, len(dataset))):
        with reading(f"row {number} (counted from 0) of the data", TEXT_ADVICE):
            row = dataset[number]
        with suppress(EmptyTextError):  # TRL trains on it
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
