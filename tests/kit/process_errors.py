"""
A tiny training in which one process has an error that the other does not have. [`main`] runs it in one process of
several: what each process raised is in `FOLDER/errors-RANK.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from unittest import mock

from kit.budget_runs import make

import trl_padfix
from trl_padfix.core.parity import check
from trl_padfix.core.parity.report import Distance, ParityReport


__all__ = ["main"]

RANK = int(os.environ.get("RANK", 0))
PACKED = {"padding_free": True, "prefix_sharing": True}

FAULTS = {
    "first batch": mock.patch.object(ParityReport, "ok", False),
    "longest row": mock.patch.object(check, "_compare_longest", return_value=Distance(1, 1, 0, 0)),
    "": contextlib.nullcontext(),
}


def train(folder: Path, fault: str) -> str:
    """The error of this process in a training, as text; the parity check of process 1 finds a `fault`."""
    trainer = make(trl_padfix, "DPO", folder, max_steps=2, per_device_train_batch_size=4, parity_check=True, **PACKED)
    broken = FAULTS[fault if RANK == 1 else ""]
    try:
        with broken:
            trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(path: str) -> None:
    folder = Path(path)
    # An error first: afterwards the collectives of both processes still match.
    errors = {fault: train(folder / "run", fault) for fault in FAULTS}
    (folder / f"errors-{RANK}.json").write_text(json.dumps(errors))
