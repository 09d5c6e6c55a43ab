"""Reports at the end of a training run: a table of first and last metrics, JSON, and a picture of the curves."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from ..files import write_whole
from ..versions import installed_versions


if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["curves", "plot_curves", "summary_table", "write_report"]

_REWARDS = "rewards/accuracies"
_ROWS = (
    ("loss", "loss", "{:.4f}"),
    ("token accuracy", "mean_token_accuracy", "{:.3f}"),
    ("reward accuracy", _REWARDS, "{:.3f}"),
    ("reward margin", "rewards/margins", "{:.3f}"),
)
_MEANS = (
    ("padding not computed", "padfix/pad_fraction", "{:.1%} of the padded batch"),
    ("repeated prefix not computed", "padfix/shared_fraction", "{:.1%} of the real tokens"),
    ("speed", "perf/tokens_per_second", "{:,.0f} real tokens/s"),
)

_PACKAGES = ("trl-padfix", "torch", "transformers", "trl", "accelerate", "datasets", "peft")


def curves(history: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric in a trainer's `state.log_history`."""
    points = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in points], [value for _, value in points]


def summary_table(history: list[dict[str, Any]]) -> Table:
    """First and last metrics of a trainer's `state.log_history`, and the tokens that were not computed."""
    # Before the first step policy and reference agree. Every margin is zero, and TRL counts a tie as wrong.
    caption = None
    if any(_REWARDS in entry for entry in history):
        caption = "Before the first step the model prefers neither reply: all ties, which count as wrong (0.000)."
    table = Table("", Column("first", justify="right"), Column("last", justify="right"), title="Run", caption=caption)
    for split, prefix in (("training", ""), ("held-out", "eval_")):
        for label, name, form in _ROWS:
            _, values = curves(history, prefix + name)
            if values:
                table.add_row(f"{split} {label}", form.format(values[0]), form.format(values[-1]))
    table.add_section()
    for label, name, form in _MEANS:
        _, values = curves(history, name)
        if values:
            table.add_row(label, "", form.format(statistics.mean(values)))
    padded = [sum(curves(history, prefix + "padfix/padded_forwards")[1]) for prefix in ("", "eval_")]
    if any(padded):
        table.add_row("forwards that could not be packed", "", f"{sum(padded):,.0f}")
    return table


def write_report(history: list[dict[str, Any]], config: TrainingArguments, path: str | Path) -> Path:
    """Write metrics, effective configuration and versions of the packages as JSON."""
    names = sorted({name for entry in history for name in entry} - {"step", "epoch"})
    metrics = {}
    for name in names:
        steps, values = curves(history, name)
        metrics[name] = {"first": values[0], "last": values[-1], "steps": [steps[0], steps[-1]]}
    report = {
        "metrics": metrics,
        "configuration": {"class": type(config).__name__, **config.to_dict()},
        "versions": installed_versions(_PACKAGES),
        "history": history,
    }
    text = json.dumps(report, indent=2, default=str) + "\n"
    return write_whole(path, lambda beside: beside.write_text(text))


def plot_curves(history: list[dict[str, Any]], path: str | Path) -> Path | None:
    """
    Draw loss, accuracy (of rewards, or of tokens) and tokens per second over the steps of a run.

    Returns the path, or `None` if the run is too short for a curve; then no file is written.
    """
    # `Figure` instead of pyplot: it needs no display and leaves no global state.
    from matplotlib.figure import Figure

    if any(_REWARDS in entry for entry in history):
        accuracy = ("reward accuracy", (_REWARDS, f"eval_{_REWARDS}"))
    else:
        accuracy = ("token accuracy", ("mean_token_accuracy", "eval_mean_token_accuracy"))
    panels = [("loss", ("loss", "eval_loss")), accuracy, ("real tokens/s", ("perf/tokens_per_second",))]
    drawn = [(title, {name: curves(history, name) for name in names}) for title, names in panels]
    drawn = [(title, lines) for title, lines in drawn if any(len(steps) > 1 for steps, _ in lines.values())]
    if not drawn:
        return None
    figure, labels = Figure(figsize=(4.4 * len(drawn), 3.9), layout="constrained"), {}
    for axes, (title, lines) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        for name, (steps, values) in lines.items():
            held_out = name.startswith("eval_")
            if steps:
                axes.plot(steps, values, "o-" if held_out else ".-", label="held-out" if held_out else "training")
        if title == "reward accuracy":
            axes.axhline(0.5, color="grey", linestyle=":", label="chance: a coin chooses between the replies")
            steps, values = lines[f"eval_{_REWARDS}"]
            if values and values[0] == 0.0:
                note = "all ties before training,\nwhich count as wrong"
                axes.annotate(note, (steps[0], 0.0), (40, 2), textcoords="offset points", fontsize=8)
        if title.endswith("accuracy"):
            axes.set_ylim(-0.03, 1.03)
        elif title == "real tokens/s":
            axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        labels |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    # Below the axes, where it covers no curve.
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=3)
    return write_whole(path, lambda beside: figure.savefig(beside, dpi=120))
