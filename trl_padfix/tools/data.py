"""Rows to measure, from wherever a user has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, load_dataset


__all__ = ["load_recipe", "load_rows"]

_FILES = {".gz", ".json", ".jsonl", ".parquet"}


def load_rows(data: str, split: str = "train") -> Dataset:
    """
    A dataset from a local `.jsonl`, `.json`, `.json.gz` or `.parquet`, a folder, a Hub id, or the YAML of a recipe.

    Args:
        data (`str`):
            Where the rows are.
        split (`str`, *optional*, defaults to `"train"`):
            Which of them, where there are several; a file has one.

    Raises:
        FileNotFoundError: If `data` looks like a local file and there is none.
        ValueError: If there is no such split.
    """
    path = Path(data)
    if path.suffix in {*_FILES, ".yaml", ".yml"} and not path.exists():
        raise FileNotFoundError(f"There is no file {data}. Give a local file, or the id of a Hub dataset.")
    if path.suffix in (".yaml", ".yml"):
        return _of_recipe(load_recipe(data), data, split)
    if path.suffix in _FILES:
        return load_dataset("parquet" if path.suffix == ".parquet" else "json", data_files=data, split="train")
    return load_dataset(data, split=split)


def load_recipe(path: str) -> dict[str, Any]:
    """
    The fields of a recipe.

    Raises:
        ValueError: If the file holds something else.
    """
    recipe = yaml.safe_load(Path(path).read_text())
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} holds a {type(recipe).__name__}, and a recipe is a mapping of fields to values.")
    return recipe


def _of_recipe(recipe: dict[str, Any], path: str, split: str) -> Dataset:
    import trl

    split = recipe.get("dataset_train_split", split)
    if recipe.get("datasets"):
        names = trl.DatasetMixtureConfig.__dataclass_fields__
        splits = trl.get_dataset(trl.DatasetMixtureConfig(**{k: v for k, v in recipe.items() if k in names}))
    elif recipe.get("dataset_name"):
        return load_dataset(recipe["dataset_name"], name=recipe.get("dataset_config"), split=split)
    else:
        raise ValueError(f"{path} names no data: a recipe has `dataset_name`, or a list `datasets`.")
    if split not in splits:
        raise ValueError(f"{path} has no split {split!r}; it has {', '.join(splits)}.")
    return splits[split]
