"""One process and two, resumed in the middle of the second epoch: to the bit the run that was not stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.kills import EPOCH, OTHERS, SET_UPS, STEPS, launch, outcome
from kit.cells import slow_but


pytestmark = pytest.mark.slow

STOPPED = EPOCH + 2
"""The run goes on from here: one step before the end of the second epoch, and so with two orders of rows to come."""


def finished(set_up: str, run: Path, resume: str = "none", **config: Any) -> Any:
    process = launch(set_up, run, resume, save_total_limit=STEPS, **config)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said[-4000:]
    return outcome(run)


def stopped_and_resumed(set_up: str, run: Path, **config: Any) -> Any:
    for step in range(STOPPED + 1, STEPS + 1):
        shutil.rmtree(run / f"checkpoint-{step}")
    return finished(set_up, run, "latest", **config)


@pytest.mark.matrix
@pytest.mark.parametrize("set_up", slow_but(["fsdp2"], [name for name in SET_UPS | OTHERS if name != "one, budget"]))
def test_a_resumed_run_is_the_one_that_was_not_stopped(set_up, tmp_path):
    logs, weights = finished(set_up, tmp_path / "run")
    resumed_logs, resumed_weights = stopped_and_resumed(set_up, tmp_path / "run")
    assert resumed_logs == logs
    assert all(torch.equal(resumed_weights[name], weight) for name, weight in weights.items())


@pytest.mark.matrix
def test_another_order_of_the_rows_would_be_seen(tmp_path):
    logs, _ = finished("ddp", tmp_path / "run")
    resumed, _ = stopped_and_resumed("ddp", tmp_path / "run", data_seed=7)
    assert resumed[:STOPPED] == logs[:STOPPED]
    assert resumed[STOPPED][0] != pytest.approx(logs[STOPPED][0], rel=1e-4)
