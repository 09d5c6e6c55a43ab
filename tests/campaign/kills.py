"""SIGKILLs at random moments of a training: resumed, it ends where it would have ended."""

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
from kit.budget_runs import build_data
from kit.methods import make_trainer
from kit.trainer_runs import build_model
from safetensors.torch import load_file

import trl_padfix


STEPS, EPOCH = 10, 3
"""Steps of a training, and of an epoch of it: kills come in any of four epochs."""

SET_UPS = {
    "one": {},
    "budget": {"max_tokens_per_batch": 120},
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
    is_saved = any((folder / "run").glob("checkpoint-*/trainer_state.json"))
    again = launch(case["set_up"], folder / "run", "latest" if is_saved else "none")
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
    target = ["campaign.kills", str(run), resume, json.dumps(SET_UPS[set_up])]
    command = [sys.executable, processes.__file__, *target]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_until(case: dict[str, Any], run: Path, process: subprocess.Popen) -> None:
    """The moment of the case, or the end of the training."""
    begin = time.monotonic()
    step, next_one = (run / f"checkpoint-{n}" for n in (case["step"], case["step"] + 1))
    while process.poll() is None and time.monotonic() - begin < 600:
        if case["saving"] and next_one.exists():
            time.sleep(case["wait"] / 10)
            return
        if not case["saving"] and (step / "trainer_state.json").exists():
            time.sleep(case["wait"])
            return
        time.sleep(0.0005)


def kill(process: subprocess.Popen) -> None:
    """The whole session of the launcher, at once."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def main(run: str, resume: str, config: str) -> None:
    """The training that is killed."""
    own = json.loads(config)
    data = build_data("DPO").select(range(4 * EPOCH))
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "max_length": 26}
    settings |= {"per_device_train_batch_size": 4, "padding_free": True, "prefix_sharing": True}
    settings |= {"disable_dropout": False}
    given = settings | own | {"model": build_model(attention_dropout=0.1), "train_dataset": data}
    trainer = make_trainer(trl_padfix, "DPO", run, **given)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(run)
