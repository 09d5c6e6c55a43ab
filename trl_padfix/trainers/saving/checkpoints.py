"""Checkpoints of a training: which of them are whole, and which one to resume from."""

from __future__ import annotations

import json
import logging
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ...files import UnwritableError, why_unwritable


__all__ = ["checkpoint_to_resume", "checkpoints_of", "saying_what_is_safe", "what_is_missing"]

logger = logging.getLogger(__name__)

NEWEST = ("true", "latest", "last")
NONE = ("", "false", "none", "null")

_ADAPTER = "adapter_model.safetensors"
_WEIGHTS = ("model.safetensors", _ADAPTER)
_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("pytorch_model*", "adapter_model.bin", "global_step*")
"""Pickles, and the folders and files of FSDP and DeepSpeed."""


def checkpoint_to_resume(asked: str | bool | None, output_dir: str | Path) -> str | None:
    """
    The checkpoint that `resume_from_checkpoint` means.

    Args:
        asked (`str` or `bool`, *optional*):
            A folder; or `True`, `"true"` or `"latest"` for the newest whole checkpoint of `output_dir`: those that are
            newer and half-written are named in a warning and left out; or `None`, `False`, `"false"` for none.
        output_dir (`str` or `Path`):
            Folder of the training's checkpoints.

    Returns:
        `str`, *optional*: its folder; `None` if the training begins anew.

    Raises:
        ValueError: If there is no whole checkpoint to resume from, or the one that is named is half-written.
    """
    word = str(asked).lower()
    if asked is None or word in NONE:
        return None
    if word not in NEWEST or Path(str(asked)).is_dir():
        return _named(Path(str(asked)))
    half = []
    for checkpoint in checkpoints_of(output_dir):
        if (missing := what_is_missing(checkpoint)) is None:
            for skipped in half:
                logger.warning(f"Skipping {skipped}. Resuming from {checkpoint}.")
            logger.info(f"Resuming from {checkpoint}.")
            return str(checkpoint)
        half.append(f"{checkpoint}, which is half-written ({missing})")
    raise ValueError(
        f"`resume_from_checkpoint={asked}`: there is no whole checkpoint in {str(output_dir)!r}"
        + (f", only {'; '.join(half)}" if half else "")
        + ". Give the `output_dir` of the training that is to go on or the folder of a checkpoint, or leave "
        "`resume_from_checkpoint` out to begin anew."
    )


def _named(checkpoint: Path) -> str:
    missing = what_is_missing(checkpoint)
    if missing is None:
        return str(checkpoint)
    whole = _newest_whole(checkpoint.parent)
    remedy = f"the newest whole one beside it is {whole}" if whole else "there is no whole one beside it"
    if not checkpoint.is_dir():
        raise ValueError(
            f"`resume_from_checkpoint={checkpoint}`: {missing}. Give the folder of a checkpoint, or `latest` for the "
            f"newest of `output_dir`; {remedy}."
        )
    raise ValueError(f"`resume_from_checkpoint={checkpoint}` is half-written ({missing}); {remedy}.")


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """The `checkpoint-STEP` folders of a training, the newest first."""
    numbered = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        step = folder.name.removeprefix("checkpoint-")
        if step.isdigit() and folder.is_dir():
            numbered.append((int(step), folder))
    return [folder for _, folder in sorted(numbered, reverse=True)]


def _newest_whole(output_dir: str | Path) -> Path | None:
    return next((c for c in checkpoints_of(output_dir) if what_is_missing(c) is None), None)


@contextmanager
def saying_what_is_safe(output_dir: str | Path) -> Iterator[None]:
    """
    Where a training saves to `output_dir`: an error of writing also says which of its checkpoints is whole.

    Raises:
        UnwritableError: In place of an error about a full disk and the like.
    """
    try:
        yield
    except Exception as error:
        if (why := why_unwritable(error)) is None:
            raise
        there = next(p for p in (Path(output_dir).absolute(), *Path(output_dir).absolute().parents) if p.exists())
        free = f"{shutil.disk_usage(there).free / 2**20:,.0f} MiB are free at {str(there)!r}"
        whole = _newest_whole(output_dir)
        safe = "There is no whole checkpoint yet: what was trained is lost."
        if whole:
            size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) / 2**20
            safe = (
                f"The newest whole checkpoint is {whole} (one takes {size:,.0f} MiB): what was trained since is "
                "lost, and `--resume_from_checkpoint latest` goes on from it."
            )
        raise UnwritableError(f"the training stopped: {why}. {free}. {safe}") from error


def what_is_missing(checkpoint: str | Path) -> str | None:
    """
    Which file of a checkpoint is not there or not whole, or `None` if all are.

    Nothing is loaded: of weights the header is read, of what torch saved the directory at the end of the file.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
    except FileNotFoundError:
        return "`trainer_state.json` is missing"
    except ValueError:
        return "`trainer_state.json` is cut short"
    if not isinstance(state, dict) or "global_step" not in state:
        return "`trainer_state.json` has no `global_step`"
    if (missing := _weights(folder)) is not None:
        return missing
    sharded = any(folder.glob("pytorch_model_fsdp*")) or any(folder.glob("global_step*"))
    complete = not _saves_only_model(folder)
    if complete and not sharded:
        for name in ("optimizer.pt", "scheduler.pt"):
            if not (folder / name).exists():
                return f"`{name}` is missing"
    if complete and not any(folder.glob("rng_state*.pth")):
        return "`rng_state.pth` is missing"
    for shards in (*folder.glob("pytorch_model_fsdp_*/"), *folder.glob("optimizer_*/")):
        if shards.is_dir() and not (shards / ".metadata").exists():  # which torch writes when all shards are there
            return f"`{shards.name}/.metadata` is missing"
    for path in (*folder.glob("*.pt"), *folder.glob("*.pth"), *folder.glob("*.bin")):
        if not zipfile.is_zipfile(path):
            return f"`{path.name}` is cut short"
    return None


def _weights(folder: Path) -> str | None:
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"`{_INDEX}` is cut short"
    else:
        names = [name for name in _WEIGHTS if (folder / name).exists()]
    names += [str(path.relative_to(folder)) for path in folder.glob(f"*/{_ADAPTER}")]  # of more adapters than one
    if not names and not any(any(folder.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        return "`model.safetensors` is missing"
    for name in names:
        if not (folder / name).exists():
            return f"`{name}` is missing"
        try:
            with safe_open(folder / name, framework="numpy"):
                pass
        except (SafetensorError, OSError):
            return f"`{name}` is cut short"
    return None


def _saves_only_model(folder: Path) -> bool:
    """Whether the training had `save_only_model`: its settings are a pickle, which is searched and not loaded."""
    path = folder / "training_args.bin"
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    # The name, perhaps an operation that memorizes it (BINPUT, LONG_BINPUT, MEMOIZE), and NEWTRUE.
    pattern = re.compile(rb"save_only_model(q.|r....|\x94)?\x88", re.DOTALL)
    return any(pattern.search(data) for data in pickles)
