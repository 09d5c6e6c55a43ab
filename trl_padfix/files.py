"""Atomic writes: files and folders are written under a temporary name next to their path, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


__all__ = [
    "DATA_FILES", "folder_obstacle", "is_missing_path", "refuse_empty", "refuse_missing", "write_whole",
    "write_whole_folder",
]  # fmt: skip

DATA_FILES = {".csv": "csv", ".gz": "json", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Builders of `datasets`, by the endings of data files."""


def is_missing_path(name: str) -> bool:
    """Whether a name is a path for certain, and not the id of a Hub repository, and there is nothing at this path."""
    path = Path(name).expanduser()
    # An id is a name, or an owner and a name. `runs/model` may be either: it is a path if the folder `runs` is here.
    is_path = (
        name.startswith((".", "/", "~")) or len(path.parts) > 2 or (len(path.parts) == 2 and path.parent.is_dir())
    )
    return is_path and not path.exists()


def refuse_missing(data: str) -> None:
    """Raise a `FileNotFoundError` if `data` is a path, by its form or ending, and nothing exists there."""
    if not Path(data).exists() and (is_missing_path(data) or Path(data).suffix in DATA_FILES):
        raise FileNotFoundError(f"there is no file or folder {data!r} here ({Path.cwd()}).")


def refuse_empty(data: str) -> None:
    """Raise a `ValueError` for an empty data file: `data`, or one in this folder. `datasets` names schemas instead."""
    path = Path(data)
    for file in path.glob("*") if path.is_dir() else [path]:
        if file.suffix in DATA_FILES and file.is_file() and not file.stat().st_size:
            raise ValueError(f"the data file {str(file)!r} is empty.")


def folder_obstacle(path: str | Path) -> str | None:
    """
    Why no file can be written into the folder `path`, which need not exist yet; `None` if one can. Commands call it
    before hours of work, not after.
    """
    path = Path(path).absolute()
    if max(len(part.encode()) for part in path.parts) > 255:
        return f"{str(path)!r} has a name that is too long. Choose a shorter one."
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"{str(existing)!r} is a file, not a folder."
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{str(path)!r} cannot be written: {error.strerror}. Write elsewhere, or change the permission."


def write_whole(path: str | Path, write: Callable[[Path], object]) -> Path:
    """
    Write a file atomically: readers of `path` find the old file or the complete new one.

    `write` is called with the path of a temporary file in the same folder, with the same suffix. Returns `path`.

    Raises:
        OSError: If it cannot be written. The temporary file is deleted, and the old file is unchanged.
    """
    path = Path(path)
    # In the same folder, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.stem[:32]}.{os.getpid()}.partial{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_whole_folder(path: str | Path, write: Callable[[Path], object]) -> Path:
    """[`write_whole`] for a new folder: `write` fills an empty one next to it. An existing folder stays as it is."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write the same folder: each has a temporary one of its own.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.mkdir()
        write(temporary)
        if not path.exists():
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path
