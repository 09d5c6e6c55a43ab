"""What a trainer counts: tokens and seconds, and what the metrics of an evaluation are means over."""

from __future__ import annotations

import time
from typing import Any

import torch


__all__ = ["EvalMeans", "TokenMeter"]


class TokenMeter:
    """Tokens and seconds since the last report, of one mode (training or evaluation), summed over processes."""

    def __init__(self) -> None:
        self.padded = self.real = self.packed = 0
        self.seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, padded: int, real: int, packed: int) -> None:
        self.padded += padded
        self.real += real
        self.packed += packed

    def report(self, padding_free: bool) -> dict[str, float]:
        """The metrics since the last report; begins anew."""
        self.pause()
        padded, real, packed, seconds = self.padded, self.real, self.packed, self.seconds
        self.__init__()
        if not padded:
            return {}
        self.start()
        metrics = {"perf/tokens_per_second": real / seconds}
        if padding_free:
            metrics |= {"padfix/pad_fraction": 1 - real / padded, "padfix/shared_fraction": 1 - packed / real}
        return metrics


class EvalMeans:
    """Means of the loss and of TRL's metrics over an evaluation, whatever its batches."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(
        self, accelerator: Any, weights: dict[str, torch.Tensor], loss: torch.Tensor, metrics: dict[str, float]
    ) -> None:
        """One batch: `loss` is this process's, `metrics` are those of all processes."""
        sums = torch.stack([*weights.values(), loss.detach() * weights["loss"]]).float()
        if accelerator.num_processes > 1:
            sums = accelerator.reduce(sums)
        *counts, total = sums.tolist()
        counted = dict(zip(weights, counts, strict=True))
        values = {name: value * counted.get(name, counted["loss"]) for name, value in metrics.items()}
        for name, value in {**values, "loss": total}.items():
            kept = self._sums.setdefault(name, [0.0, 0.0])
            kept[0] += value
            kept[1] += counted.get(name, counted["loss"])

    def of(self, *names: str) -> dict[str, float]:
        """The means of `names`, of those that were counted."""
        return {name: self._sums[name][0] / self._sums[name][1] for name in names if self._sums.get(name, [0, 0])[1]}
