"""Counts the tokens of a trainer's forwards, padded, real and computed, for its log and its progress bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ProgressCallback

from ...core.handle import PaddingRemoval
from ...core.layout.flat_maps import on_device
from ..parts import Evaluation, Part, Step


__all__ = ["TokenCounter", "TokenCounts", "forward_counts", "summed_over_processes"]


class TokenCounter:
    """
    Tokens and seconds since the last report, of one mode (training or evaluation), summed over processes.

    Sums over processes are on their device, and nobody reads them before the report.
    """

    def __init__(self) -> None:
        self._counts, self._on_device = [0] * 5, None
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, counts: list[int] | torch.Tensor) -> None:
        """
        Count a step: its padded, real and packed tokens, and of the forwards in which `prefix_sharing="auto"` had the
        choice those that shared, and all.
        """
        if isinstance(counts, torch.Tensor):
            self._on_device = counts if self._on_device is None else self._on_device + counts
        else:
            self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]

    def report(self, padding_free: bool) -> dict[str, float]:
        """The metrics since the last report; begins anew."""
        self.pause()
        if self._on_device is not None:
            self.add(self._on_device.tolist())
        padded, real, packed, shared, forwards = self._counts
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
        if mode == "train":
            _show_in_progress_bar(self.trainer.callback_handler.callbacks, metrics)
        logs.update({prefix + name: value for name, value in metrics.items()})


def forward_counts(handle: PaddingRemoval | None) -> list[int]:
    """
    Padded, real and packed tokens of all packed forwards so far; with `prefix_sharing="auto"` also how many of them
    shared prefixes, and how many there were.
    """
    if handle is None:
        return [0] * 5
    stats, chooses = handle.stats, handle.prefix_sharing == "auto"
    choices = [stats.shared_forwards, stats.forwards] if chooses else [0, 0]
    return [stats.padded_tokens, stats.real_tokens, stats.packed_tokens, *choices]


def summed_over_processes(counts: list[int] | torch.Tensor, trainer: Any) -> list[int] | torch.Tensor:
    """The counts of all processes that have rows of their own; on the device where there are several."""
    accelerator = trainer.accelerator
    if accelerator.num_processes == 1:
        return counts
    replicas = getattr(trainer, "get_tp_size", lambda: 1)()  # tensor-parallel processes have the same rows
    if isinstance(counts, list):
        counts = on_device(torch.tensor(counts), accelerator.device)
    return accelerator.reduce(counts) // replicas


def _step_counts(
    batches: list[dict[str, torch.Tensor]], counted: list[int], chose: list[int]
) -> list[int] | torch.Tensor:
    """
    Padded, real and packed tokens of `batches`, and what `chose` counts.

    `counted` are those of the packed forwards that ran on them. A policy that is its own reference (with the adapter
    switched off) ran twice on the same batches, so the counts are scaled to the shapes of the batches. Where none ran
    the masks say how many tokens are real; nobody waits for them. Without batches the forwards alone are counted.
    """
    if not batches:
        return [*counted, *chose]
    padded = sum(batch["input_ids"].numel() for batch in batches)
    if counted[0]:
        return [padded, *(round(count * padded / counted[0]) for count in counted[1:]), *chose]
    masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches]
    real = torch.stack([mask.sum() for mask in masks]).sum()
    return torch.stack([torch.full_like(real, padded), real, *(torch.full_like(real, n) for n in (padded, *chose))])


def _show_in_progress_bar(callbacks: list[Any], metrics: dict[str, float]) -> None:
    """Put real tokens a second, and the share of a batch that is not computed, behind the bar of the steps."""
    if not metrics:
        return
    text = f"{metrics['perf/tokens_per_second']:,.0f} tokens/s"
    if "padfix/pad_fraction" in metrics:
        saved = 1 - (1 - metrics["padfix/pad_fraction"]) * (1 - metrics["padfix/shared_fraction"])
        text += f", {saved:.0%} of the batch not computed"
    for callback in callbacks:
        if isinstance(callback, ProgressCallback) and callback.training_bar is not None:
            callback.training_bar.set_postfix_str(text)
