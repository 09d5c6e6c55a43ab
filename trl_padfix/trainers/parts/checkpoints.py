"""Checkpoints that appear complete or not at all, and the newest complete one to resume from."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import SeedableRandomSampler
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback

from .part import Part


if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState


__all__ = ["BESIDE", "WholeCheckpoints", "checkpoint_to_resume", "checkpoints_of", "what_is_missing"]


logger = logging.getLogger(__name__)

BESIDE = "_being_written"
"""Temporary folder in the output directory. Trainer does not upload names with a leading underscore."""

NEWEST = ("true", "latest", "last")
NONE = ("", "false", "none", "null")

_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*", "adapter_model.bin", "global_step*")
"""Files and folders of weights, those of FSDP (`pytorch_model_fsdp*`) and DeepSpeed (`global_step*`) included."""


class WholeCheckpoints(Part):
    """
    Writes a checkpoint into a temporary folder on the same disk, and renames it when all processes have written.

    Trainer writes file by file into the final folder: a process that ends meanwhile leaves half a checkpoint there.
    """

    is_saving = False

    @contextlib.contextmanager
    def training(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """A block that trains; yields the checkpoint to resume from."""
        callback = SamplerEpochs()
        self.trainer.add_callback(callback)
        try:
            yield checkpoint_to_resume(resume_from_checkpoint, self.trainer.args.output_dir)
        finally:
            self.trainer.remove_callback(callback)

    def output_dir(self, run_dir: str) -> str:
        """The folder that Trainer writes to now: while saving, the temporary one instead of `run_dir`."""
        return os.path.join(run_dir, BESIDE) if self.is_saving else run_dir

    @contextlib.contextmanager
    def saving(self, run_dir: Path) -> Iterator[None]:
        """A block in which Trainer writes a checkpoint: into the temporary folder, which is renamed at the end."""
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        checkpoint = run_dir / f"checkpoint-{state.global_step}"
        beside = run_dir / BESIDE / checkpoint.name
        if args.local_process_index == 0:
            shutil.rmtree(run_dir / BESIDE, ignore_errors=True)  # of a process that was killed
        trainer.accelerator.wait_for_everyone()
        self.is_saving = True
        try:
            yield
        finally:
            self.is_saving = False
        if state.best_model_checkpoint == str(beside):
            state.best_model_checkpoint = str(checkpoint)
            if args.should_save:
                state.save_to_json(str(beside / "trainer_state.json"))
        trainer.accelerator.wait_for_everyone()  # all processes have written their files
        # First a disk that all nodes share, then one per node.
        for renames in (args.process_index == 0, args.local_process_index == 0):
            if renames and beside.exists():
                _put_in_place(beside, checkpoint)
            trainer.accelerator.wait_for_everyone()
        if args.should_save and args.save_total_limit:
            _rotate(run_dir, checkpoint, state.best_model_checkpoint, args.save_total_limit)
        if args.push_to_hub:  # a thread uploads, and must find the checkpoint in its final folder
            trainer._push_from_checkpoint(str(checkpoint))


def _put_in_place(beside: Path, checkpoint: Path) -> None:
    """Rename a complete checkpoint to its final folder; replaces one of the same step."""
    if checkpoint.exists():  # a folder that is not empty cannot be the target of a rename
        checkpoint.rename(beside.with_name(f"{beside.name}.old"))
    beside.rename(checkpoint)
    shutil.rmtree(beside.parent, ignore_errors=True)


def _rotate(run_dir: Path, newest: Path, best: str | None, limit: int) -> None:
    """Remove the oldest checkpoints, except the newest and the best, as Trainer does."""
    protected = {newest, Path(best or newest)}
    ages = {folder: folder.stat().st_mtime for folder in checkpoints_of(run_dir)}
    oldest_first = sorted(ages, key=lambda folder: (ages[folder], int(folder.name[11:])))
    removable = [folder for folder in oldest_first if folder not in protected]
    (run_dir / BESIDE).mkdir(exist_ok=True)
    for folder in removable[: max(0, len(ages) - max(limit, len(protected & ages.keys())))]:
        folder.rename(run_dir / BESIDE / folder.name)  # a kill while it is removed leaves no half checkpoint
    shutil.rmtree(run_dir / BESIDE, ignore_errors=True)


class SamplerEpochs(TrainerCallback):
    """
    Sets the epoch of the sampler at the beginning of each epoch.

    With several processes a data loader that skips batches does not (accelerate 1.15): a run resumed in its second
    epoch would get the rows in the order of the first.
    """

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        sampler = kwargs.get("train_dataloader")
        while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
            inner = getattr(sampler, "batch_sampler", None)
            # Compared with `None`, since a sampler without a length has no truth value.
            sampler = inner if inner is not None else getattr(sampler, "sampler", None)
        if sampler is not None:
            sampler.set_epoch(int(state.epoch or 0))


def checkpoint_to_resume(resume_from: str | bool | None, output_dir: str | Path) -> str | None:
    """
    The checkpoint selected by `resume_from_checkpoint`; `None` to begin from the start.

    `resume_from` is a folder; or `True`, `"true"` or `"latest"` for the newest complete checkpoint of `output_dir`,
    with a warning about newer incomplete ones; or `None`, `False`, `"false"` for none.

    Raises:
        ValueError: If there is no complete checkpoint, or the named one is incomplete.
    """
    word = str(resume_from).lower()
    if resume_from is None or word in NONE:
        return None
    if word not in NEWEST or Path(str(resume_from)).is_dir():
        if (missing := what_is_missing(str(resume_from))) is not None:
            raise ValueError(f"`resume_from_checkpoint={resume_from}` is no complete checkpoint: {missing}.")
        return str(resume_from)
    for checkpoint in checkpoints_of(output_dir):
        if (missing := what_is_missing(checkpoint)) is None:
            logger.info(f"Resuming from {checkpoint}.")
            return str(checkpoint)
        logger.warning(f"Skipping {checkpoint}, which is incomplete: {missing}.")
    raise ValueError(
        f"`resume_from_checkpoint={resume_from}`: there is no complete checkpoint in {str(output_dir)!r}. Name a "
        "folder, or leave `resume_from_checkpoint` out to begin from the start."
    )


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """The `checkpoint-STEP` folders of a training, the newest first."""
    # By step and not by time: copying a folder changes its time.
    folders = [f for f in Path(output_dir).glob("checkpoint-*") if f.name[11:].isdecimal() and f.is_dir()]
    return sorted(folders, key=lambda folder: int(folder.name[11:]), reverse=True)


def what_is_missing(checkpoint: str | Path) -> str | None:
    """The first missing or truncated file of a checkpoint, as text; `None` if it is complete. Loads no tensor."""
    folder = Path(checkpoint)
    if not folder.is_dir():
        return "there is no such folder"
    files = sorted(path for pattern in ("*", "*/*.safetensors") for path in folder.glob(pattern) if path.is_file())
    if truncated := [path for path in files if not _is_whole(path)]:
        return f"`{truncated[0].relative_to(folder)}` is cut short"
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        return "there are no weights"
    needed = {"trainer_state.json"}  # Trainer writes it last
    if (folder / _INDEX).exists():
        needed |= set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    is_sharded = any(path for pattern in ("*_fsdp*", "global_step*") for path in folder.glob(pattern))
    if any(folder.glob("rng_state*.pth")) and not is_sharded:  # `save_only_model` writes none of them
        needed |= {"optimizer.pt", "scheduler.pt"}
    missing = sorted(name for name in needed if not (folder / name).exists())
    return f"`{missing[0]}` is missing" if missing else None


def _is_whole(path: Path) -> bool:
    """Whether a file can be parsed as far as its structure: JSON, the header of safetensors, the end of a zip."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="numpy"):
                pass
    except (SafetensorError, OSError, ValueError):
        return False
    # `torch.save` writes zip files, whose directory is at the end: a truncated one is no zip file.
    return path.suffix not in (".pt", ".pth", ".bin") or zipfile.is_zipfile(path)
