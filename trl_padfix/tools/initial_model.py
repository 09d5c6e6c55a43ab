"""Models that recipes build in their output folder: built once, and not reused for other settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..files import write_whole_folder


__all__ = ["build_tiny", "built_once", "fingerprint"]

RECORD = "built_from.json"
"""File in the folder of a model with the settings that it was built from."""


def built_once(directory: str | Path, built_from: dict[str, Any], build: Callable[[Path], object]) -> str:
    """
    Build a model and its tokenizer in a folder, or reuse them if they were built from equal settings.

    The folder appears complete or not at all. With several processes, the main one builds it.

    Args:
        directory (`str` or `Path`):
            Folder of the model.
        built_from (`dict`):
            Everything that the model depends on, as JSON can store it. It is saved in the folder.
        build (`Callable`):
            Function that saves model and tokenizer in the empty folder that it gets.

    Returns:
        `str`: The folder.

    Raises:
        ValueError: If the folder holds a model that was built from other settings.
    """
    directory = Path(directory)
    with PartialState().main_process_first():
        if directory.exists():
            # Compared as JSON, because tuples become lists in the file.
            _check(directory, json.loads(json.dumps(built_from)))
        else:
            record = json.dumps(built_from, indent=2) + "\n"
            write_whole_folder(directory, lambda beside: (build(beside), (beside / RECORD).write_text(record)))
    return str(directory)


def fingerprint(texts: Iterable[str]) -> str:
    """SHA-256 of texts: equal if a tokenizer would be trained on the same texts."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")  # lone surrogates occur in scraped data
        # The length first: ["ab", "c"] and ["a", "bc"] must differ.
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _check(directory: Path, built_from: dict[str, Any]) -> None:
    """Refuse a folder whose model was built from other settings."""
    record = directory / RECORD
    recorded = json.loads(record.read_text()) if record.exists() else None
    if recorded == built_from:
        return
    reason = "an earlier version or another program wrote it"
    if recorded is not None:
        names = [name for name in {**recorded, **built_from} if recorded.get(name) != built_from.get(name)]
        values = (f"`{n}` {recorded.get(n)!r} there and {built_from.get(n)!r} now" for n in names if n != "texts")
        reason = f"it was built for another training: {', '.join([*values, *['other data'] * ('texts' in names)])}"
    raise ValueError(
        f"{str(directory)!r} exists, and {reason}. Delete it to build it again, or choose another folder."
    )


def build_tiny(shape: str, rows: Any, directory: str | Path) -> str:
    """
    Train a tokenizer on the data, build a random Qwen2 for it, and save both like a downloaded model.

    For trying things out: no download, and seconds on a CPU. A folder that holds the same model already is kept.

    Args:
        shape (`str`):
            `"tiny"` or `"small"`.
        rows (`Iterable[dict]`):
            Rows of any of TRL's formats.
        directory (`str` or `Path`):
            Folder of the model.

    Returns:
        `str`: the folder, for `from_pretrained` or a trainer.

    Raises:
        ValueError: For an unknown shape.

    Example:

    ```python
    from datasets import load_dataset
    from trl_padfix import build_tiny

    pairs = load_dataset("recipes/data/preferences", split="train")
    model = build_tiny("tiny", pairs, "runs/tiny")
    ```
    """
    from .data import texts_of_row
    from .tiny import SHAPES, build_qwen2, train_tokenizer

    if shape not in SHAPES:
        raise ValueError(f"`build_tiny` has the shapes {', '.join(SHAPES)}, and none is called {shape!r}.")

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer((text for row in rows for text in texts_of_row(row)), SHAPES[shape]["vocab_size"])
        tokenizer.save_pretrained(folder)
        build_qwen2(tokenizer, **SHAPES[shape] | {"vocab_size": len(tokenizer)}).save_pretrained(folder)

    data = fingerprint(text for row in rows for text in texts_of_row(row))
    return built_once(directory, {"tiny_model": shape, **SHAPES[shape], "texts": data}, build)
