"""Paths that a user names, and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


__all__ = ["DATA_FILES", "refuse_missing", "write_whole_folder"]

DATA_FILES = {f".{name}": name for name in ("arrow", "csv", "json", "parquet")} | {".gz": "json", ".jsonl": "json"}
"""Builders of `datasets`, by the endings of data files. `save_to_disk` writes .arrow files."""


def refuse_missing(name: str, place: str, in_cache: bool = False, holds: tuple[str, ...] = ()) -> None:
    """
    Refuse a name that is a path, and not the id of a Hub repository, if there is nothing at this path.

    With `in_cache` also a model that is not in the cache of the Hub, if the Hub is offline; with `holds` also a folder
    without any of these files.

    Raises:
        FileNotFoundError: With the place in which the user has written the name.
    """
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    nothing, path = f"{place}: there is no file or folder {name!r} here ({Path.cwd()})", Path(name)
    # An id is a name, or an owner and a name. `runs/model` may be either: it is a path if the folder `runs` is here.
    has_folder = "\\" in name or len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir())
    if (name.startswith((".", "/", "~")) or path.suffix in DATA_FILES or has_folder) and not path.exists():
        form = " (write `/`, and no `~`)" if "\\" in name or name.startswith("~") else ""
        raise FileNotFoundError(f"{nothing}. Correct the path{form}, or first run what writes it.")
    if path.is_file() and (in_cache or path.suffix not in DATA_FILES):
        raise ValueError(f"{place}: {name!r} is a file of a type that is not read. Name a folder, or data as .jsonl.")
    if path.is_dir() and not any((path / file).exists() for file in holds or os.listdir(path)):
        remedy = "Merge the adapter into a model" if (path / "adapter_config.json").exists() else "Name another folder"
        raise ValueError(f"{place}: the folder {name!r} has no {' or '.join(holds) or 'file'}. {remedy}.")
    cached = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    if in_cache and HF_HUB_OFFLINE and not path.exists() and not cached.exists():
        raise FileNotFoundError(
            f"{nothing} and no model of this name in the cache of the Hub, and HF_HUB_OFFLINE forbids a download. "
            "Correct the name, or unset HF_HUB_OFFLINE."
        )


def write_whole_folder(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Make a folder: `write` fills an empty one next to it, which is then renamed. One with files stays as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write the same folder: each has a temporary one of its own. Ids of processes are not unique, as
    # there may be several machines, or containers.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        temporary.mkdir()
        write(temporary)
        try:
            temporary.rename(path)
        except OSError:
            if not path.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path
