"""What a trainer counts: tokens and seconds, and what the metrics of an evaluation are means over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator


__all__ = ["EvalMeans", "TokenMeter", "gathering_nothing", "own_rows"]


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
        self, accelerator: Accelerator, sizes: dict[str, torch.Tensor], loss: torch.Tensor, metrics: dict[str, float]
    ) -> None:
        """One batch of each process: its loss and metrics, and what they are means over; `"loss"` if not named."""
        names = ["loss", *sorted(metrics)]
        weights = torch.stack([sizes.get(name, sizes["loss"]) for name in names]).float()
        values = torch.cat([loss.detach().float().reshape(1), weights.new_tensor([metrics[n] for n in names[1:]])])
        totals = torch.stack([torch.where(weights > 0, values * weights, 0.0), weights])
        if accelerator.num_processes > 1:
            totals = accelerator.reduce(totals)
        for name, total, weight in zip(names, *totals.tolist(), strict=True):
            kept = self._sums.setdefault(name, [0.0, 0.0])
            kept[0] += total
            kept[1] += weight

    def of(self, *names: str) -> dict[str, float]:
        """The means of `names`, of those that were counted."""
        return {name: self._sums[name][0] / self._sums[name][1] for name in names if self._sums.get(name, [0, 0])[1]}


@contextlib.contextmanager
def gathering_nothing(accelerator: Accelerator) -> Iterator[None]:
    """`accelerator.gather` and `gather_for_metrics` return what they are given, until the block ends."""

    def own(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    saved = dict(vars(accelerator))
    vars(accelerator).update(gather=own, gather_for_metrics=own)
    try:
        yield
    finally:
        for name in ("gather", "gather_for_metrics"):
            del vars(accelerator)[name]
            vars(accelerator).update({name: saved[name]} if name in saved else {})


def own_rows(accelerator: Accelerator, batch: dict[str, Any], rows_per_item: int) -> tuple[dict[str, Any], bool]:
    """
    A batch without the rows that other processes have too: the last one is filled up with rows of the first.

    Returns:
        The batch, and whether any row of it is its own; where none is, it is as it was given.
    """
    state, rows = accelerator.gradient_state, batch["input_ids"].shape[0]
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return batch, True
    items = rows // rows_per_item
    own = min(max(state.remainder - accelerator.process_index * items, 0), items)
    if own in (0, items) or any(v.shape[0] not in (items, rows) for v in batch.values() if _is_array(v)):
        return batch, own > 0
    cut = {k: torch.cat([part[:own] for part in v.split(items)]) for k, v in batch.items() if _is_array(v)}
    return {**batch, **cut}, True


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
