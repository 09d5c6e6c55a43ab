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
from trl_padfix.core.parity.report import ParityReport


__all__ = ["main"]

RANK = int(os.environ.get("RANK", 0))
PACKED = {"padding_free": True, "prefix_sharing": True}


def train(folder: Path, fails: bool) -> str:
    """The error of this process in a training, as text; `fails`: the parity check of process 1 finds a difference."""
    trainer = make(trl_padfix, "DPO", folder, max_steps=2, per_device_train_batch_size=4, parity_check=True, **PACKED)
    broken = mock.patch.object(ParityReport, "ok", False) if fails and RANK == 1 else contextlib.nullcontext()
    try:
        with broken:
            trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(path: str) -> None:
    folder = Path(path)
    # An error first: afterwards the collectives of both processes still match.
    errors = {str(fails): train(folder / "run", fails) for fails in (True, False)}
    (folder / f"errors-{RANK}.json").write_text(json.dumps(errors))
