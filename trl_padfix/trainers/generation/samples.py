"""Writes generated texts to the output directory, prints them and sends them to the trackers."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import integrations

from ...files import write_whole


__all__ = ["Sample", "show", "write"]


Sample = dict[str, str]
"""A `prompt`, the model's `prediction`, and the `reference` answer of the dataset."""


def write(samples: list[Sample], path: Path) -> None:
    """Write samples to `path` as JSON lines; replaces those of an earlier evaluation of the same step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
    write_whole(path, lambda beside: beside.write_text("".join(lines), encoding="utf-8"))


def show(samples: list[Sample], title: str, step: int, callbacks: list[Any]) -> None:
    """Print samples as a table with a title, and send it to those `callbacks` that are running trackers."""
    if not samples:
        return
    rows = [{"step": step, **sample} for sample in samples]
    _print(rows, f"{title}, step {step}")
    for callback in callbacks:
        _send(pd.DataFrame(rows), title, step, callback)


def _print(rows: list[dict[str, Any]], title: str) -> None:
    names = ("prompt", "prediction", "reference")
    if find_spec("rich") is None:  # only the extra `cli` installs it
        print(title, *(f"{name}: {row[name]}" for row in rows for name in names), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*names, title=title, show_lines=True)
    for row in rows:
        table.add_row(*(Text(row[name]) for name in names))
    Console().print(table)


def _send(table: pd.DataFrame, title: str, step: int, callback: Any) -> None:
    if isinstance(callback, integrations.TensorBoardCallback) and callback.tb_writer is not None:
        texts = ["| " + " | ".join(map(_cell, row)) + " |" for row in [table.columns, *table.to_numpy()]]
        texts.insert(1, "|---" * len(table.columns) + "|")
        callback.tb_writer.add_text(title, "\n".join(texts), step)
    elif not getattr(callback, "_initialized", False):
        return  # a tracker starts its run when training begins; `evaluate()` alone has none
    elif isinstance(callback, integrations.CometCallback):
        experiment = import_module("comet_ml").get_running_experiment()
        experiment.log_table(f"{title.replace('/', '_')}.csv", tabular_data=table)
    for tracker, kind in (("wandb", integrations.WandbCallback), ("trackio", integrations.TrackioCallback)):
        if isinstance(callback, kind):
            module = import_module(tracker)
            module.log({title: module.Table(dataframe=table)})


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")
