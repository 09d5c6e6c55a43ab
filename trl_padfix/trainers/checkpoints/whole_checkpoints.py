"""The part of a trainer that writes checkpoints atomically, and resumes from complete ones."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.logging import get_logger
from transformers import TrainerCallback

from ..parts import Part
from .checkpoints import checkpoint_to_resume, checkpoints_of, require_same_model, saying_what_is_safe


if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from ..parts import PaddingFreeTrainer


__all__ = ["BESIDE", "SamplerEpochs", "WholeCheckpoints"]


logger = get_logger(__name__)

BESIDE = "_being_written"
"""Temporary folder in the output directory. Trainer does not upload names with a leading underscore."""


class WholeCheckpoints(Part):
    """
    Writes complete checkpoints only, and resumes from the newest one.

    Trainer writes a checkpoint file by file into its final folder: a process that ends meanwhile leaves half of it.
    Here all processes write into a temporary folder on the same disk, which is renamed when all have finished.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self.is_saving = self.is_to_push = False

    @contextlib.contextmanager
    def training(self, resume_from_checkpoint: str | bool | None) -> Iterator[str | None]:
        """A block that trains; yields the checkpoint to resume from."""
        output_dir = self.trainer.args.output_dir
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, output_dir)
        if checkpoint is not None:
            require_same_model(checkpoint, self.trainer.model)
        self._remove_half_written(Path(output_dir))
        callbacks = (SamplerEpochs(), StreamSteps())
        for callback in callbacks:
            self.trainer.add_callback(callback)
        try:
            with saying_what_is_safe(output_dir):
                yield checkpoint
        finally:
            for callback in callbacks:
                self.trainer.remove_callback(callback)

    def output_dir(self, run_dir: str) -> str:
        """The folder that Trainer writes to now: while saving, the temporary one instead of `run_dir`."""
        return os.path.join(run_dir, BESIDE) if self.is_saving else run_dir

    def postpones_push(self) -> bool:
        """Whether to upload later: the upload runs in a thread, and must find the checkpoint in its final folder."""
        self.is_to_push = self.is_to_push or self.is_saving
        return self.is_saving

    @contextlib.contextmanager
    def saving(self, run_dir: Path) -> Iterator[None]:
        """A block in which Trainer writes a checkpoint: into the temporary folder, which is renamed at the end."""
        trainer, args, state = self.trainer, self.trainer.args, self.trainer.state
        checkpoint = run_dir / f"checkpoint-{state.global_step}"
        beside = run_dir / BESIDE / checkpoint.name
        self._remove_half_written(run_dir)
        try:
            self.is_saving = True
            yield
            self._name_the_best(run_dir, beside)
        except BaseException:
            shutil.rmtree(run_dir / BESIDE, ignore_errors=True)
            raise
        finally:
            self.is_saving = False
        trainer.accelerator.wait_for_everyone()  # all processes have written their files
        # First a disk that all nodes share, then one per node.
        for puts in (args.process_index == 0, args.local_process_index == 0):
            if puts:
                _put_in_place(beside, checkpoint)
            trainer.accelerator.wait_for_everyone()
        if args.should_save and args.save_total_limit:
            _rotate(run_dir, checkpoint, state.best_model_checkpoint, args.save_total_limit)
        if self.is_to_push:
            self.is_to_push = False
            trainer._push_from_checkpoint(str(checkpoint))

    def _name_the_best(self, run_dir: Path, beside: Path) -> None:
        """Put the final path of the best checkpoint into the state, also in the file that was written already."""
        state = self.trainer.state
        best = getattr(state, "best_global_step", None)
        if best is None:
            return
        named, place = state.best_model_checkpoint, run_dir / f"checkpoint-{best}"
        if place.name == beside.name or place.exists():
            state.best_model_checkpoint = str(place)
        if named != state.best_model_checkpoint and self.trainer.args.should_save:
            state.save_to_json(str(beside / "trainer_state.json"))

    def _remove_half_written(self, run_dir: Path) -> None:
        """Remove the temporary folder of a killed process."""
        if self.trainer.args.local_process_index == 0 and (run_dir / BESIDE).exists():
            logger.info(f"Removing {run_dir / BESIDE}, a checkpoint that was never finished.")
            shutil.rmtree(run_dir / BESIDE, ignore_errors=True)
        self.trainer.accelerator.wait_for_everyone()


def _put_in_place(beside: Path, checkpoint: Path) -> None:
    """Rename a complete checkpoint to its final folder; replaces one of the same step."""
    if not beside.exists():  # another process has renamed it, or this node saves nothing
        return
    old = beside.with_name(f"{beside.name}.old")
    if checkpoint.exists():  # a folder that is not empty cannot be the target of a rename
        checkpoint.rename(old)
    beside.rename(checkpoint)
    shutil.rmtree(beside.parent, ignore_errors=True)


def _rotate(run_dir: Path, newest: Path, best: str | None, limit: int) -> None:
    """Remove the oldest checkpoints, except the newest and the best, as Trainer does."""
    protected = {newest, Path(best)} if best else {newest}
    ages = {folder: folder.stat().st_mtime for folder in checkpoints_of(run_dir)}
    oldest_first = sorted(ages, key=lambda folder: (ages[folder], int(folder.name.rpartition("-")[2])))
    removable = [folder for folder in oldest_first if folder not in protected]
    for folder in removable[: max(0, len(ages) - max(limit, len(protected & ages.keys())))]:
        try:
            (run_dir / BESIDE).mkdir(exist_ok=True)
            # Renamed first: a process that is killed while it removes leaves no half checkpoint.
            shutil.rmtree(folder.rename(run_dir / BESIDE / folder.name), ignore_errors=True)
        except OSError as error:
            logger.warning(f"{folder} is beyond `save_total_limit={limit}` and could not be removed: {error}")
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


class StreamSteps(TrainerCallback):
    """
    Raises a `ValueError` after two passes over a stream without an optimizer step.

    The stream then has fewer batches than `gradient_accumulation_steps`, and Trainer would loop over it for ever.
    """

    def __init__(self) -> None:
        self.first_step, self.passes = 0, 0

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.first_step = state.global_step

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        is_stream = not isinstance(getattr(kwargs.get("train_dataloader"), "dataset", None), Sized)
        self.passes = self.passes + 1 if is_stream and state.global_step == self.first_step else 0
        if self.passes == 2 and not control.should_training_stop:
            raise ValueError(
                f"The train dataset is a stream with fewer batches than a step takes: two passes over it ended before "
                f"`gradient_accumulation_steps={args.gradient_accumulation_steps}` batches of "
                f"{args.per_device_train_batch_size} rows came up, so there would never be a step. Give it more rows, "
                "lower one of the two, or repeat the stream (`dataset.repeat()`)."
            )
