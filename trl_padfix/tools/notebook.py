"""Pictures of the notebooks: batches coloured by their rows, curves, and trainings over time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from ..core.layout.layout import Layout


__all__ = ["Curve", "draw", "draw_race", "draw_rows", "over_time", "rows_of"]

Curve = tuple[list[float], list[float]]
"""Points of a curve: their `x`, and their `y`."""


def rows_of(batch: torch.Tensor | Layout) -> np.ndarray:
    """
    Say of each cell of a picture which row of the batch its token belongs to.

    Args:
        batch (`torch.Tensor` of shape `(B, L)`, or [`Layout`]):
            An attention mask, which stays as it is, or a layout, whose packed tokens are wrapped to lines of `L`.

    Returns:
        `numpy.ndarray` of shape `(lines, L)`: rows from 0; -1 for a token that several rows share, NaN for no token.
    """
    if isinstance(batch, torch.Tensor):
        return np.where(batch.bool().cpu(), np.arange(len(batch))[:, None], np.nan)
    width, count = batch.batch_shape[1], batch.packed_tokens
    row_of = batch.packed_index // width
    if batch.source is not None:
        row_of = row_of.masked_fill(torch.bincount(batch.source, minlength=count) > 1, -1)
    cells = np.full(-(-count // width) * width, np.nan)
    cells[:count] = row_of.cpu()
    return cells.reshape(-1, width)


def draw_rows(panels: Mapping[str, np.ndarray]) -> None:
    """Draw cells as [`rows_of`] returns them, each panel as high as it has lines; -1 is grey, NaN light grey."""
    import matplotlib.pyplot as plt

    lines = [len(cells) for cells in panels.values()]
    rows = max(np.nanmax(cells) for cells in panels.values())
    size = (10, 0.14 * max(sum(lines), 8) + 0.45 * len(lines))
    _, axes = plt.subplots(
        len(lines), 1, figsize=size, layout="constrained", height_ratios=lines, squeeze=False, sharex=True
    )
    colours = plt.get_cmap("turbo").with_extremes(under="0.6", bad="0.93")
    for axis, (title, cells) in zip(axes[:, 0], panels.items(), strict=True):
        axis.imshow(cells, aspect="auto", interpolation="nearest", cmap=colours, vmin=0, vmax=rows + 1)
        axis.set_title(title, fontsize=10)
        axis.set_yticks([])
    axes[-1, 0].set_xlabel("column")
    plt.show()


def draw(panels: Mapping[str, Mapping[str, Curve | float]]) -> None:
    """Draw panels side by side: bars of those that have numbers, lines of those that have points."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, len(panels), figsize=(10, 3), layout="constrained", squeeze=False)
    for axis, (title, drawn) in zip(axes[0], panels.items(), strict=True):
        axis.set_title(title, fontsize=10)
        curves = [(name, value) for name, value in drawn.items() if isinstance(value, tuple)]
        for (name, points), style in zip(curves, ("-", "--", ":", "-.") * len(curves), strict=False):
            axis.plot(*points, style, label=name, linewidth=2)
        if curves:
            axis.legend(fontsize=8)
        else:
            axis.bar_label(axis.bar(list(drawn), list(drawn.values())), fmt="{:,.0f}")
            axis.margins(y=0.15)
            axis.tick_params(labelsize=8)
    plt.show()


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def note(self, loss: float) -> None:
        self.seconds.append(time.perf_counter())
        self.losses.append(loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "loss" in logs:
            self.note(float(logs["loss"]))


def over_time(training: Trainer | Iterable[float]) -> Curve:
    """
    Train, and note when each loss came: seconds and losses.

    `training` is a trainer with `logging_steps=1`, or what yields the loss of one step after the other. The clock
    starts after the first step, which warms up and, in a trainer of ours, checks parity.
    """
    clock = _Clock()
    if isinstance(training, Trainer):
        training.remove_callback(PrinterCallback)
        training.add_callback(clock)
        training.train()
    else:
        for loss in training:
            clock.note(loss)
    return [seconds - clock.seconds[0] for seconds in clock.seconds], clock.losses


def draw_race(runs: Mapping[str, Curve]) -> None:
    """Draw the losses of [`over_time`] over steps and over seconds, and print how long each run took."""
    steps = {name: (list(range(1, len(losses) + 1)), losses) for name, (_, losses) in runs.items()}
    draw({"loss over steps": steps, "loss over seconds": runs})
    first = next(iter(runs.values()))[0][-1]
    for name, (seconds, _) in runs.items():
        print(f"{name}: {seconds[-1]:.1f} s, {first / seconds[-1]:.1f}x")
