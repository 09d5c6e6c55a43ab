"""Draws the pictures of the notebooks: batches colored by row, curves, and losses with their seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trl_padfix import Layout


__all__ = ["Curve", "draw", "draw_race", "draw_rows", "over_time", "rows_of"]

Curve = tuple[list[float], list[float]]
"""The `x` and the `y` of the points of a curve."""


def rows_of(batch: torch.Tensor | Layout) -> np.ndarray:
    """
    Number the cells of a picture by the row of the batch that their tokens belong to.

    Args:
        batch (`torch.Tensor` of shape `(B, L)`, or [`Layout`]):
            An attention mask, drawn as it is, or a layout, whose packed tokens are wrapped into lines of `L` tokens.

    Returns:
        `numpy.ndarray` of shape `(lines, L)`: row numbers from 0; -1 for a token that several rows share, NaN for a
        cell without a token.
    """
    if isinstance(batch, torch.Tensor):
        return np.where(batch.bool().cpu(), np.arange(len(batch))[:, None], np.nan)
    width, count = batch.batch_shape[1], batch.packed_tokens
    row_of = batch.packed_index // width  # packed_index: where each packed token is in the flattened batch
    if batch.source is not None:
        row_of = row_of.masked_fill(torch.bincount(batch.source, minlength=count) > 1, -1)
    cells = np.full(-(-count // width) * width, np.nan)  # rounded up: the last line may be incomplete
    cells[:count] = row_of.cpu()
    return cells.reshape(-1, width)


def draw_rows(panels: Mapping[str, np.ndarray]) -> None:
    """Draw cells as [`rows_of`] returns them, each panel in proportion to its lines; -1 is gray, NaN light gray."""
    import matplotlib.pyplot as plt

    lines = [len(cells) for cells in panels.values()]
    rows = max(np.nanmax(cells) for cells in panels.values())
    size = (10, 0.14 * max(sum(lines), 8) + 0.45 * len(lines))  # inches: 0.14 for a line, 0.45 for a title
    _, axes = plt.subplots(
        len(lines), 1, figsize=size, layout="constrained", height_ratios=lines, squeeze=False, sharex=True
    )
    colors = plt.get_cmap("turbo").with_extremes(under="0.6", bad="0.93")
    for axis, (title, cells) in zip(axes[:, 0], panels.items(), strict=True):
        axis.imshow(cells, aspect="auto", interpolation="nearest", cmap=colors, vmin=0, vmax=rows + 1)
        axis.set_title(title, fontsize=10)
        axis.set_yticks([])
    axes[-1, 0].set_xlabel("column")
    plt.show()


def draw(panels: Mapping[str, Mapping[str, Curve | float]]) -> None:
    """Draw panels side by side: numbers as bars, curves as lines."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, len(panels), figsize=(10, 3), layout="constrained", squeeze=False)
    for axis, (title, values) in zip(axes[0], panels.items(), strict=True):
        axis.set_title(title, fontsize=10)
        curves = [(name, value) for name, value in values.items() if isinstance(value, tuple)]
        # Other styles: curves that lie on one another, as equal losses do, stay visible.
        for (name, points), style in zip(curves, ("-", "--", ":", "-.") * len(curves), strict=False):
            axis.plot(*points, style, label=name, linewidth=2)
        if curves:
            axis.legend(fontsize=8)
            axis.set(xlabel="step", ylabel=title)
        else:
            axis.bar_label(axis.bar(list(values), list(values.values())), fmt="{:,.0f}")
            axis.margins(y=0.15)
            axis.tick_params(labelsize=8)
    plt.show()


class _Clock(TrainerCallback):
    """Records when each loss is logged."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def record(self, loss: float) -> None:
        self.seconds.append(time.perf_counter())
        self.losses.append(loss)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.record(float(logs["loss"]))


def over_time(training: Trainer | Iterable[float]) -> Curve:
    """
    Train, and return the seconds at which losses were logged, and the losses.

    `training` is a trainer with `logging_steps=1`, or an iterable that yields the loss of each step. The clock starts
    after the first step, which warms up and, in a trainer of `trl_padfix`, runs the parity check.
    """
    clock = _Clock()
    if isinstance(training, Trainer):
        training.remove_callback(PrinterCallback)  # the notebook draws the losses
        training.add_callback(clock)
        training.train()
    else:
        for loss in training:
            clock.record(loss)
    return [seconds - clock.seconds[0] for seconds in clock.seconds], clock.losses


def draw_race(runs: Mapping[str, Curve]) -> None:
    """
    Draw the losses of [`over_time`] over steps, and the seconds of each run as bars; print the seconds.

    A later curve is thinner than the curves before it: equal losses lie on one another, and all of them stay visible.
    """
    import matplotlib.pyplot as plt

    _, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", width_ratios=(3, 2))
    baseline = next(iter(runs.values()))[0][-1]
    for i, (name, (seconds, losses)) in enumerate(runs.items()):
        left.plot(range(1, len(losses) + 1), losses, label=name, linewidth=6 / 2**i, alpha=0.4 if i == 0 else 1)
        label = f"{seconds[-1]:.1f} s, {baseline / seconds[-1]:.1f}x"
        right.bar_label(right.barh(name, seconds[-1], alpha=0.4 if i == 0 else 1), [label], padding=4)
        print(f"{name}: {label}")
    left.set(xlabel="step", ylabel="loss", title="the losses of each step")
    left.legend(fontsize=8)
    right.set(xlabel="seconds", title="the seconds of all steps")
    right.invert_yaxis()
    right.margins(x=0.5)
    plt.show()
