"""Files and folders that appear whole or not at all: written beside their place, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


__all__ = ["UnwritableError", "refuse_folder", "refuse_output", "why_unwritable", "write_whole", "write_whole_folder"]


class UnwritableError(OSError):
    """Something could not be written; the message says what, why, and what is safe."""


_WHY = {
    errno.ENOSPC: "the disk is full. Free space on it, or write to another",
    errno.EDQUOT: "your quota of the disk is used up. Free space, or write to another disk",
    errno.EFBIG: "the file would be larger than the file system or a limit of this process (`ulimit -f`) allows",
    errno.EROFS: "the file system is read-only. Write elsewhere",
    errno.EIO: "the device failed. Write elsewhere, and check the device",
}

_REFUSED = {
    errno.ENOENT: "there is no folder {!r} that takes files. Make it, or write elsewhere",
    errno.ENOTDIR: "{!r} is a file, not a folder. Write elsewhere",
    errno.EISDIR: "it is a folder. Name a file in it",
    errno.ENAMETOOLONG: "its name is too long. Choose a shorter one",
    errno.EACCES: "no permission. Write elsewhere, or change the permission",
}


def why_unwritable(error: BaseException) -> str | None:
    """Why a file could not be written, by the error of the system, torch or safetensors; `None` for other errors."""
    text = str(error)
    number, path = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    if number is None and (found := re.search(r"os error (\d+)", text)):
        number = int(found[1])
    if number is None and "PytorchStreamWriter failed writing" in text:
        return "torch could not write a file: the disk is full, or a limit is reached (`ulimit -f`). Free space"
    why = _WHY.get(number or 0)
    return why and (why if path is None else f"{str(path)!r}: {why}")


def refuse_output(path: str | Path) -> str | None:
    """Why a file cannot be written to `path`, or `None` if it can; asked before hours of work, not after them."""
    path = Path(path)
    try:
        if path.exists():  # if not, it is not made: other processes ask at the same time
            path.open("ab").close()
        with tempfile.TemporaryFile(dir=path.parent):  # files are written beside their place
            return None
    except OSError as error:
        why = _REFUSED.get(error.errno or 0, f"{error.strerror} (errno {error.errno}). Write elsewhere")
        return f"{str(path)!r} cannot be written: {why.format(str(path.parent))}."


def refuse_folder(path: str | Path) -> str | None:
    """Why nothing can be written into the folder `path`, which need not exist yet; `None` if it can."""
    path = Path(path).absolute()
    if max(len(part.encode()) for part in path.parts) > 255:
        return f"{str(path)!r} has a name that is too long. Choose a shorter one."
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    return refuse_output(there / ".trl_padfix") if there.is_dir() else f"{str(there)!r} is a file, not a folder."


def write_whole(path: str | Path, write: Callable[[Path], object]) -> Path:
    """
    Write a file beside its place and rename it: whoever reads `path` finds the old file, or the whole new one.

    `write` is called with the path of a temporary file in the same folder, with the same ending. Returns `path`.

    Raises:
        OSError: If it cannot be written; nothing half-written is left, and what was there before is untouched.
    """
    path = Path(path)
    beside = path.with_name(f".{path.stem[:32]}.{os.getpid()}.partial{path.suffix}")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def write_whole_folder(path: str | Path, write: Callable[[Path], object]) -> Path:
    """[`write_whole`] for a folder: `write` fills an empty one beside `path`, which then replaces what was there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, old = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "old"))
    for left_over in (beside, old):  # by a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        beside.mkdir()
        write(beside)
        if path.exists():  # a folder cannot be renamed onto one that is not empty
            path.rename(old)
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return path
