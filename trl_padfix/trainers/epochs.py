"""Callbacks at the beginning and at the end of an epoch: what the loop of Trainer leaves out."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from accelerate.data_loader import SeedableRandomSampler
from transformers import TrainerCallback


__all__ = ["SamplerEpochs", "StreamSteps"]


class SamplerEpochs(TrainerCallback):
    """
    Tells the sampler its epoch before each.

    A dataloader that skips batches at several processes does not hand `set_epoch` on to its sampler (accelerate 1.15),
    and a run that is resumed in its second epoch would see the rows in the order of the first.
    """

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sampler = kwargs.get("train_dataloader")
        while sampler is not None and not isinstance(sampler, SeedableRandomSampler):
            inner = getattr(sampler, "batch_sampler", None)  # which may have no length, and so no truth
            sampler = inner if inner is not None else getattr(sampler, "sampler", None)
        if sampler is not None:
            sampler.set_epoch(int(state.epoch or 0))


class StreamSteps(TrainerCallback):
    """
    Stops a training that never comes to a step: its stream has fewer batches than an optimizer step takes.

    Trainer begins the stream anew and counts its batches anew, for ever.

    Raises:
        ValueError: At the end of the second pass over a stream without a step.
    """

    def __init__(self) -> None:
        self.at_begin, self.passes = 0, 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_begin = state.global_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_stream = not isinstance(getattr(kwargs.get("train_dataloader"), "dataset", None), Sized)
        self.passes = self.passes + 1 if is_stream and state.global_step == self.at_begin else 0
        if self.passes == 2 and not control.should_training_stop:
            raise ValueError(
                f"The train dataset is a stream with fewer batches than a step takes: two passes over it ended before "
                f"`gradient_accumulation_steps={args.gradient_accumulation_steps}` batches of "
                f"{args.per_device_train_batch_size} rows came up, so there would never be a step. Give it more rows, "
                "lower one of the two, or let the stream begin anew (`dataset.repeat()`)."
            )
