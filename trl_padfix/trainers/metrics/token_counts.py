"""Counts padded, real and packed tokens of a trainer's forwards, for its log and its progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from copy import copy

import torch
from accelerate.logging import get_logger

from ...core.context import context
from ...core.handle import PaddingRemoval, PaddingStats
from ...core.layout.layout import to_device_async
from ..distributed import data_replicas
from ..messages import say
from ..parts.part import Evaluation, PaddingFreeTrainer, Part, Step


__all__ = ["NO_MASK", "TokenCounter", "TokenCounts", "report_of"]

logger = get_logger(__name__)

NO_MASK = "the model was called with neither a two-dimensional attention mask nor rows that are packed already"
"""Why no forward was packed, if none had a reason to run padded."""

ONE_ROW = (
    "Each forward has one row, and so no padding to remove. A larger forward is usually faster, and shares prefixes: "
    "set `per_device_train_batch_size={}` and `gradient_accumulation_steps=1`. The step is the same. If it needs too "
    "much memory, also set `max_tokens_per_batch`."
)


class TokenCounter:
    """Tokens and seconds of one mode (training or evaluation) since the last report, summed over processes."""

    def __init__(self) -> None:
        self.sums: dict[torch.device, torch.Tensor] = {}
        """Sums of counts by their device: only the report reads them, because reading waits for the device."""
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, tokens: int | torch.Tensor, forwards: PaddingStats, trainer: PaddingFreeTrainer) -> None:
        """Add the real tokens of a step's batches and the counts of its forwards, summed over processes."""
        # `tokens` may be on a device. Reading it here would wait for it in every step.
        tokens = torch.as_tensor(tokens)
        counts = torch.stack([tokens, *(torch.full_like(tokens, count) for count in vars(forwards).values())])
        if trainer.accelerator.num_processes > 1:
            summed = trainer.accelerator.reduce(to_device_async(counts, trainer.accelerator.device))
            counts = summed // data_replicas(trainer)
        self.sums[counts.device] = self.sums.get(counts.device, 0) + counts

    def report(self, handle: PaddingRemoval | None) -> dict[str, float]:
        """
        The metrics since the last report; resets the counter. Fractions are of packed forwards, if any.

        `handle`: that of the policy; `None` if padding is not removed.
        """
        self.pause()
        sums = [x.cpu() for x in self.sums.values()]
        seconds, self.seconds, self.sums = self.seconds, 0.0, {}
        tokens, *of_forwards = torch.stack(sums).sum(0).tolist() if sums else [0]
        counts = PaddingStats(*of_forwards)
        if not (tokens or counts.padded_forwards):
            return {}
        self.start()
        metrics = {"perf/tokens_per_second": tokens / seconds} if tokens and seconds else {}
        if handle is not None and counts.real_tokens:
            metrics["padfix/pad_fraction"] = counts.pad_fraction
            metrics["padfix/shared_fraction"] = counts.shared_fraction
        if counts.filler_tokens:
            metrics["padfix/filler_fraction"] = counts.filler_tokens / (counts.packed_tokens + counts.filler_tokens)
        if counts.padded_forwards:
            metrics["padfix/padded_forwards"] = counts.padded_forwards
        if handle is not None and handle.prefix_sharing == "auto" and counts.forwards:
            metrics["padfix/auto_shared"] = counts.shared_forwards / counts.forwards
        return metrics


class TokenCounts(Part):
    """Logs tokens per second and the fractions of tokens that padding removal and prefix sharing save."""

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self.counters = {"train": TokenCounter(), "eval": TokenCounter()}
        self._counted = PaddingStats()  # in steps, since the last `count_beside` began

    def around_training_step(self) -> contextlib.AbstractContextManager[None]:
        self.counters["train"].start()  # before rows are generated
        return super().around_training_step()

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        counter, padding = self.counters[step.mode], self.trainer.padding
        counter.start()
        before = copy(padding.stats)
        # Padded forwards of `_prepare_inputs` count, too. The user may have reset the counts.
        before.padded_forwards = min(self._counted.padded_forwards, before.padded_forwards)
        yield
        new = padding.stats - before
        self._counted = padding.stats - (before - self._counted)
        counter.add(_real_tokens(step.batches, new), new, self.trainer)
        self._warn_if_unpacked()
        self._advise(step, new)

    def _warn_if_unpacked(self) -> None:
        """Say once that no forward has been packed so far, or since the padding removal was detached by hand."""
        padding, handle = self.trainer.padding, self.trainer.padding.handle
        if handle is None or handle in context().disabled or not self.settings.padding_free:
            return
        # A packed row of a single sequence has no padding and is not packed again.
        is_unpacked = not (handle.stats.forwards or handle.stats.padded_forwards or padding.task.packs_rows())
        if handle.is_detached or is_unpacked:
            why = "padding removal was detached from the model" if handle.is_detached else NO_MASK
            handle.say_once(f"Nothing was packed: {why}. No savings are logged.", tell=logger.warning)

    def _advise(self, step: Step, new: PaddingStats) -> None:
        """Say once that batches of one row have no padding, if a step accumulates the gradients of several."""
        trainer, steps = self.trainer, self.trainer.args.gradient_accumulation_steps
        # Packed rows have no mask, and rows of one generation are padded to the longest of them.
        sizes = {len(batch["input_ids"]) for batch in step.batches if "attention_mask" in batch}
        is_single = sizes == {1} and not trainer.padding.task.generates_rows and step.mode == "train" and steps > 1
        if is_single and 0 < new.padded_tokens == new.packed_tokens and trainer.accelerator.is_local_main_process:
            trainer.padding.handles[0].say_once(ONE_ROW.format(steps), tell=say)

    @contextlib.contextmanager
    def around_evaluation_loop(self, evaluation: Evaluation) -> Iterator[None]:
        self.counters["train"].pause()
        counter = self.counters["eval"] = TokenCounter()
        with self.count_beside("eval"):  # of a user's `prediction_step` without `compute_loss`
            yield
        counter.pause()  # tokens generated after the loop (`predict_with_generate`) do not count

    @contextlib.contextmanager
    def count_beside(self, mode: str) -> Iterator[None]:
        """Count what a block computes outside of `compute_loss`, too."""
        self.counters[mode].start()
        self._counted = copy(self.trainer.padding.stats)
        yield
        beside = self.trainer.padding.stats - self._counted
        self.counters[mode].add(beside.real_tokens, beside, self.trainer)

    def log(self, logs: dict[str, float], mode: str) -> None:
        padding = self.trainer.padding
        logs.update(report_of(self.counters, mode, padding.handle if padding.is_removed else None))


def report_of(counters: dict[str, TokenCounter], mode: str, handle: PaddingRemoval | None) -> dict[str, float]:
    """The metrics of a mode since its last report, with names that begin with `eval_` for evaluation."""
    prefix = "eval_" if mode == "eval" else ""
    return {prefix + name: value for name, value in counters[mode].report(handle).items()}


def _real_tokens(batches: list[dict[str, torch.Tensor]], counts: PaddingStats) -> int | torch.Tensor:
    """The real tokens of `batches`, by their masks; without batches those of the forwards."""
    if not batches or counts.padded_tokens == sum(batch["input_ids"].numel() for batch in batches):
        return counts.real_tokens  # known on the host
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
    return torch.stack([mask.sum() for mask in masks]).sum()
