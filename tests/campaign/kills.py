"""SIGKILLs at random moments of a training, on one and two processes: resumed, it ends where it would have ended."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from campaign import HELD
from kit import processes
from safetensors.torch import load_file

from trl_padfix.trainers.parts.checkpoints import checkpoints_of, what_is_missing


STEPS, EPOCH = 10, 3
"""Steps of a training, and of an epoch of it: kills come in any of four epochs."""

SET_UPS = {
    "one": (1, {}),
    "one, budget": (1, {"max_tokens_per_batch": 120}),
    "ddp": (2, {}),
    "ddp, budget": (2, {"max_tokens_per_batch": 120}),
    "fsdp2": (2, {}),
}


def draw(chance: random.Random) -> dict[str, Any]:
    return {
        "set_up": chance.choice(list(SET_UPS)),
        "saving": chance.random() < 0.5,
        "step": chance.randint(1, STEPS - 1),
        "wait": chance.random() * 0.15,
    }


def attempt(case: dict[str, Any], folder: Path) -> str:
    logs, weights = unkilled(case["set_up"])
    process = launch(case["set_up"], folder / "run")
    try:
        wait_until(case, folder / "run", process)
    finally:
        kill(process)
    for checkpoint in checkpoints_of(folder / "run"):
        missing = what_is_missing(checkpoint)
        assert missing is None, f"{checkpoint.name} is half-written: {missing}"
    again = launch(case["set_up"], folder / "run", "latest" if checkpoints_of(folder / "run") else "none")
    _, said = again.communicate(timeout=600)
    assert again.returncode == 0, said[-2000:]
    resumed_logs, resumed_weights = outcome(folder / "run")
    assert resumed_logs == logs, f"{resumed_logs} is not {logs}"
    assert all(torch.equal(resumed_weights[name], weight) for name, weight in weights.items())
    return HELD


@cache
def unkilled(set_up: str) -> tuple[Any, Any]:
    folder = Path(mkdtemp())
    process = launch(set_up, folder / "run")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said[-3000:]
    return outcome(folder / "run")


def outcome(run: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    checkpoint = run / f"checkpoint-{STEPS}"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    logs = [(log["loss"], log["grad_norm"]) for log in state["log_history"] if "loss" in log]
    assert len(logs) == STEPS
    return logs, load_file(run / "model.safetensors")


def launch(set_up: str, run: Path, resume: str = "none") -> subprocess.Popen:
    count, own = SET_UPS[set_up]
    target = ["campaign.killed_run", str(run), resume, json.dumps(own)]
    command = [sys.executable, processes.__file__, *target]
    if count > 1:
        name = "fsdp2" if set_up == "fsdp2" else "multi_gpu"
        command = processes.accelerated(name, run.with_name(f"{run.name}.yaml"), *target)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"ACCELERATE_TORCH_DEVICE": "cpu"} if set_up == "fsdp2" else {}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_until(case: dict[str, Any], run: Path, process: subprocess.Popen) -> None:
    """The moment of the case, or the end of the training."""
    begin = time.monotonic()
    step, beside = run / f"checkpoint-{case['step']}", run / "_being_written"
    while process.poll() is None and time.monotonic() - begin < 600:
        if case["saving"] and step.exists() and beside.exists():
            time.sleep(case["wait"] / 10)
            return
        if not case["saving"] and step.exists():
            time.sleep(case["wait"])
            return
        time.sleep(0.0005)


def kill(process: subprocess.Popen) -> None:
    """The whole session of the launcher, at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
