"""
Asynchronous GRPO in one process of several, on recorded rollouts: [`main`] trains the cases that it is given, each a
family and `lora` or `full`, and returns what was logged.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from kit.async_runs import ROWS, SHARED, Run, make, train
from kit.processes import on_gpus
from kit.trainer_runs import lora


STEPS = 3


def train_case(folder: Path, case: str, processes: int = 1, samples: Any = None, **given: Any) -> Run:
    """A training of which all processes together take `ROWS` samples in a step, those of a file by default."""
    family, kind = case.split(",")
    samples = samples or torch.load(folder / family / "samples.pt", weights_only=False)
    more = {"peft_config": lora(target_modules=["q_proj", "v_proj"])} if kind == "lora" else {}
    rows = ROWS // processes
    settings = {"max_steps": STEPS, "per_device_train_batch_size": rows} | SHARED | more | given
    return train(make(folder / family / "policy", folder / f"{case}-{processes}", samples, **settings))


def main(path: str, *cases: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder, processes = Path(path), int(os.environ["WORLD_SIZE"])
    logged = {}
    for case in cases:
        print(f"{case} begins", file=sys.stderr, flush=True)
        run = train_case(folder, case, processes, use_cpu=not on_gpus())
        trainer = run.trainer
        # All processes take part: a sharded weight is gathered from all of them.
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()]
        if int(os.environ["RANK"]) == 0:
            torch.save(torch.cat([p.detach().flatten() for p in weights]), folder / f"{case}.pt")
        entered = trainer.accelerator.reduce(torch.tensor(run.entered), reduction="sum").item()
        compared = trainer.padding.parity["train"][0].compared
        logged[case] = {"logs": [log for log in run.logs if "loss" in log], "entered": entered, "compared": compared}
        if int(os.environ["RANK"]) == 0:
            logged[case]["sent"] = trainer.weight_transfer.sent
    return logged
