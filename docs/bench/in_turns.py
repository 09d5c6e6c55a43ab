"""Steps of several modes in turns: the losses must agree, and each mode is timed beside the first one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from trl_padfix import PaddingStats


def timed_step(
    losses: dict[str, Callable[[], torch.Tensor]], optimizers: dict[str, torch.optim.Optimizer], step: int
) -> dict[str, float]:
    """Seconds of loss, backward and optimizer of each mode; ends the program if the losses of the modes differ."""
    seconds, found = {}, {}
    for mode, compute_loss in losses.items():
        begin = time.perf_counter()
        loss = compute_loss()
        loss.backward()
        optimizers[mode].step()
        optimizers[mode].zero_grad()
        seconds[mode], found[mode] = time.perf_counter() - begin, loss.item()
    first = next(iter(found.values()))
    if any(abs(loss - first) > 1e-4 * max(abs(first), 1) for loss in found.values()):
        raise SystemExit(f"step {step}: the losses differ: {found}")
    return seconds


def report(name: str, steps: list[dict[str, float]], stats: PaddingStats) -> None:
    """Print the token counts of a mode with shared prefixes, and the speed of each mode over that of the first."""
    real, packed = (n / stats.padded_tokens for n in (stats.real_tokens, stats.packed_tokens))
    print(f"{name}: 1 / {real:.2f} / {packed:.2f} padded / real / distinct tokens")
    first, *modes = steps[0]
    for mode in modes:
        ratio = statistics.median(seconds[first] / seconds[mode] for seconds in steps)
        medians = [statistics.median(seconds[m] for seconds in steps) for m in (first, mode)]
        print(f"{mode}: {ratio:.2f}x (median of {len(steps)} steps: {medians[0]:.2f} s and {medians[1]:.2f} s)")
