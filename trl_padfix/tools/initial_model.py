"""A model that a recipe builds in its output folder: built once, and never taken for another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from safetensors import SafetensorError, safe_open

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
        ValueError: If what is there was built from something else, or is half-written.
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
    remedy = f"Delete {str(directory)!r} to build it anew, or choose another `output_dir`."
    try:
        found = json.loads((directory / RECORD).read_text())
        with safe_open(directory / "model.safetensors", framework="numpy"):
            pass
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{str(directory)!r} is there and is no whole model of a known recipe ({error}): an earlier version or "
            f"another program wrote it. {remedy}"
        ) from error
    if found != built_from:
        values = {name: (found.get(name), built_from.get(name)) for name in {**found, **built_from}}
        differences = ", ".join(
            f"`{n}` {old!r} there and {new!r} now" for n, (old, new) in values.items() if old != new
        )
        raise ValueError(f"{str(directory)!r} was built for another training: {differences}. {remedy}")
