"""Counts the tokens of a trainer's forwards, padded, real and computed, for its log and its progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ProgressCallback

from ...core.handle import PaddingRemoval, PaddingStats
from ...core.layout.flat_maps import to_device_async
from ..distributed import data_replicas
from ..parts import Evaluation, Part, Step


__all__ = ["TokenCounter", "TokenCounts", "forward_counts", "summed_over_processes"]


class TokenCounter:
    """Tokens and seconds since the last report, of one mode (training or evaluation), summed over processes."""

    def __init__(self) -> None:
        self.sums: dict[torch.device, torch.Tensor] = {}
        """What was added, by its device; nobody reads it before the report."""
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, counts: torch.Tensor) -> None:
        """Count a step, by what [`TokenCounts`] counts of it."""
        self.sums[counts.device] = self.sums.get(counts.device, 0) + counts

    def report(self, padding_free: bool) -> dict[str, float]:
        """The metrics since the last report; begins anew."""
        self.pause()
        counts = torch.stack([torch.zeros(5, dtype=torch.int64), *(x.cpu() for x in self.sums.values())]).sum(0)
        padded, real, packed, shared, forwards = counts.tolist()
        seconds = self.seconds
        self.__init__()
        if not padded:
            return {}
        self.start()
        metrics = {"perf/tokens_per_second": real / seconds} if seconds else {}
        if padding_free:
            metrics |= {"padfix/pad_fraction": 1 - real / padded, "padfix/shared_fraction": 1 - packed / real}
        if forwards:
            metrics["padfix/auto_shared"] = shared / forwards
        return metrics


class TokenCounts(Part):
    """Tokens a second, and the share of them that padding removal saves, in the log of a trainer."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.counters = {"train": TokenCounter(), "eval": TokenCounter()}

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        counter = self.counters[step.mode]
        counter.start()
        before = forward_counts(self.trainer.padding.handle)
        yield
        counted = [after - b for after, b in zip(forward_counts(self.trainer.padding.handle), before, strict=True)]
        counts = _step_counts(step.batches, counted[:3], counted[3:])
        counter.add(summed_over_processes(counts, self.trainer))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        self.counters["train"].pause()
        self.counters["eval"] = TokenCounter()
        yield

    @contextlib.contextmanager
    def evaluation(self, evaluation: Evaluation) -> Iterator[None]:
        yield
        self.counters["eval"].pause()  # what is generated then is not counted

    def log(self, logs: dict[str, float], mode: str) -> None:
        prefix = "eval_" if mode == "eval" else ""
        metrics = self.counters[mode].report(self.trainer.padding.is_removed)
        if mode == "train" and metrics:
            _show_in_progress_bar(self.trainer.callback_handler.callbacks, metrics)
        logs.update({prefix + name: value for name, value in metrics.items()})


def forward_counts(handle: PaddingRemoval | None) -> list[int]:
    """
    Padded, real and packed tokens of all packed forwards so far; with `prefix_sharing="auto"` also how many of them
    shared prefixes, and how many there were.
    """
    stats = handle.stats if handle is not None else PaddingStats()
    chooses = handle is not None and handle.prefix_sharing == "auto"
    choices = [stats.shared_forwards, stats.forwards] if chooses else [0, 0]
    return [stats.padded_tokens, stats.real_tokens, stats.packed_tokens, *choices]


def summed_over_processes(counts: torch.Tensor, trainer: Any) -> torch.Tensor:
    """The counts of all processes that have rows of their own."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return counts
    return accelerator.reduce(to_device_async(counts, accelerator.device)) // data_replicas(trainer)


def _step_counts(batches: list[dict[str, torch.Tensor]], counted: list[int], chose: list[int]) -> torch.Tensor:
    """
    Padded, real and packed tokens of `batches`, and what `chose` counts.

    `counted` are those of the packed forwards. A policy that is its own reference (its adapter switched off) ran twice
    on the same batches, so they are scaled to the shapes of the batches. Where none ran the masks are summed up.
    """
    if not batches:
        return torch.tensor([*counted, *chose])
    padded = sum(batch["input_ids"].numel() for batch in batches)
    if counted[0]:
        return torch.tensor([padded, *(round(count * padded / counted[0]) for count in counted[1:]), *chose])
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
    real = torch.stack([mask.sum() for mask in masks]).sum()
    return torch.stack([torch.full_like(real, padded), real, *(torch.full_like(real, n) for n in (padded, *chose))])


def _show_in_progress_bar(callbacks: list[Any], metrics: dict[str, float]) -> None:
    """Put real tokens a second, and the share of a batch that is not computed, behind the bar of the steps."""
    text = f"{metrics['perf/tokens_per_second']:,.0f} tokens/s"
    if "padfix/pad_fraction" in metrics:
        saved = 1 - (1 - metrics["padfix/pad_fraction"]) * (1 - metrics["padfix/shared_fraction"])
        text += f", {saved:.0%} of the batch not computed"
    for callback in callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.set_postfix_str(text)
