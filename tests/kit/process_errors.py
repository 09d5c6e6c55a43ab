"""
Tiny trainings in which one process has an error that the others do not have. [`main`] runs them in one process of
several, one after another: what each process raised is in `FOLDER/errors-RANK.json`, by training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kit.budget_runs import make

from trl_padfix.core.parity.report import ParityReport
from trl_padfix.trainers.batching.budget_collator import BudgetCollator
from trl_padfix.trainers.metrics.finite_values import FiniteValues, PendingValue


__all__ = ["CELLS"]

RANK = int(os.environ.get("RANK", 0))
PACKED = {"padding_free": True, "prefix_sharing": True}

CELLS = {
    "parity": "ParityError: ",
    "loss": "FloatingPointError: The loss of training in step 2 is nan",
    "loss of a micro-batch": "FloatingPointError: The loss of training in step 2 is nan",
    "collator, pairs": "ValueError: a row of the data",
    "collator, texts": "ValueError: a row of the data",
    "no error": "",
}
"""Trainings, each with the beginning of the error that process 1 has."""


def _broken_loss(step: int) -> contextlib.AbstractContextManager[Any]:
    """The loss of the first forward of a step is NaN."""
    record, numbers = FiniteValues._record, []

    def broken(self: FiniteValues, value: PendingValue) -> None:
        numbers.append(value.step)
        if numbers[-1] == step and numbers.count(step) == 1:
            value = value._replace(value=torch.tensor(float("nan")))
        record(self, value)

    return mock.patch.object(FiniteValues, "_record", broken)


def _failing_collator(step: int) -> contextlib.AbstractContextManager[Any]:
    calls, collate = [], BudgetCollator.__call__

    def failing(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == step:
            raise ValueError("a row of the data")
        return collate(self, *args)

    return mock.patch.object(BudgetCollator, "__call__", failing)


def train(cell: str, folder: Path) -> None:
    name = "sft" if cell == "collator, texts" else "dpo"
    given: dict[str, Any] = PACKED | {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "parity_check": cell == "parity",
    }
    given |= {"stop_on_nonfinite": True} if cell.startswith("loss") else {}
    given |= {"max_tokens_per_batch": None} if cell in ("parity", "loss") else {}
    errors = {
        "parity": lambda: mock.patch.object(ParityReport, "ok", False),
        "loss": lambda: _broken_loss(step=2),
        "loss of a micro-batch": lambda: _broken_loss(step=2),
        "collator, pairs": lambda: _failing_collator(step=2),
        "collator, texts": lambda: _failing_collator(step=2),
        "no error": contextlib.nullcontext,
    }
    trainer = make(name, folder, ours=True, **given)
    with errors[cell]() if RANK == 1 else contextlib.nullcontext():
        trainer.train()


def main(path: str, *cells: str) -> None:
    errors = {}
    for cell in cells:
        print(f"{cell} begins", file=sys.stderr, flush=True)
        try:
            train(cell, Path(path) / "run")
            errors[cell] = ""
        except Exception as error:
            errors[cell] = f"{type(error).__name__}: {error}"
    Path(path, f"errors-{RANK}.json").write_text(json.dumps(errors))
