"""A model that a recipe builds in its output folder: built once, and never taken for another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ..files import write_whole_folder


__all__ = ["built_once", "fingerprint"]

RECORD = "built_from.json"


def built_once(directory: str | Path, built_from: dict[str, Any], build: Callable[[Path], object]) -> str:
    """
    Build a model and its tokenizer into a folder, or take those that are there if they were built from the same.

    `built_from` is everything that the model depends on, as JSON takes it, and is kept in the folder; `build` saves
    model and tokenizer into the empty folder it is given. The folder appears whole or not at all; of several
    processes, the main one builds it.

    Raises:
        ValueError: If what is there was built from something else.
    """
    directory = Path(directory)
    with PartialState().main_process_first():
        if directory.exists():
            _check(directory, json.loads(json.dumps(built_from)))
        else:
            record = json.dumps(built_from, indent=2) + "\n"
            write_whole_folder(directory, lambda beside: (build(beside), (beside / RECORD).write_text(record)))
    return str(directory)


def fingerprint(texts: Iterable[str]) -> str:
    """SHA-256 over texts: whether a tokenizer would be trained on the same ones."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _check(directory: Path, built_from: dict[str, Any]) -> None:
    record = directory / RECORD
    found = json.loads(record.read_text()) if record.exists() else None
    if found == built_from:
        return
    why = "an earlier version or another program wrote it"
    if found is not None:
        values = {name: (found.get(name), built_from.get(name)) for name in {**found, **built_from}}
        differences = (f"`{n}` {a!r} there and {b!r} now" for n, (a, b) in values.items() if a != b)
        why = f"it was built for another training: {', '.join(differences)}"
    raise ValueError(
        f"{str(directory)!r} is there, and {why}. Delete it to build it anew, or choose another `output_dir`."
    )
