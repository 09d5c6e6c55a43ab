"""
Recorded trajectories: every number that a trainer logs in ten steps and two evaluations stays what it was.

`trajectories.json` holds, for each trainer, what TRL's own logs without padding removed, and for each cell, a trainer
in one of our modes, the metrics in which ours logs something else, if any.

Run cells, or write the file:

    PYTHONPATH=.:tests python tests/end_to_end/test_trajectories.py -k "DPO and sharing and budget"
    PYTHONPATH=.:tests python tests/end_to_end/test_trajectories.py --write
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
import trl
from kit.methods import DEFAULTS, make_trainer
from kit.observe import entered_tokens
from kit.trainer_runs import break_mode

import trl_padfix


FILE = Path(__file__).with_name("trajectories.json")
COMMAND = "PYTHONPATH=.:tests python tests/end_to_end/test_trajectories.py --write"

STEPS, LAYERS = 10, 2
BUDGETS = {"DPO": 70, "SFT": 40, "Reward": 70, "KTO": 40, "GRPO": 70, "RLOO": 70, "Distillation": 70}
"""Tokens for a part of a batch, and more than a row alone has."""
ONLINE = ("GRPO", "RLOO", "Distillation")
FREE = {"padding_free": True, "parity_check": False}
SETTINGS: dict[str, Any] = dict(
    max_steps=STEPS, eval_strategy="steps", eval_steps=STEPS // 2, optim="sgd", learning_rate=3e-2, seed=0,
    per_device_eval_batch_size=4, lr_scheduler_type="constant",
)  # fmt: skip


class Cell(NamedTuple):
    """A trainer in one of our modes."""

    kind: str
    mode: str
    side: str

    @property
    def name(self) -> str:
        return f"{self.kind}-text-{self.mode}{f'-{self.side}' if self.side else ''}"

    @property
    def config(self) -> dict[str, Any]:
        budget = {"max_tokens_per_batch": BUDGETS[self.kind]} if "budget" in self.mode else {}
        own = {"padded": {}, "free": FREE, "sharing": FREE | {"prefix_sharing": True}}[self.mode.partition("-")[0]]
        return own | budget | ({"padding_side": self.side} if self.side else {})


MODES = ["padded", "free", "sharing", "free-budget", "sharing-budget"]


def cells() -> list[Cell]:
    """Each trainer in all modes, with the sides of the padding by turns."""
    sides = ("right", "left")
    return [
        Cell(kind, mode, "" if kind in ONLINE or mode == "padded" else sides[(i + j) % 2])
        for i, kind in enumerate(BUDGETS)
        for j, mode in enumerate(MODES)
    ]


FAST = {
    "DPO-text-sharing-budget-right",
    "SFT-text-free-right",
    "Reward-text-free-budget-left",
    "KTO-text-sharing-left",
    "GRPO-text-sharing-budget",
}  # fmt: skip


# -- trainings


def complete(prompt_ids: list[list[int]], step: int) -> list[list[int]]:
    """Completions drawn from the prompts and the step, not from logits: no rounding moves them."""
    drawn = []
    for i, ids in enumerate(prompt_ids):
        draw = random.Random(f"{ids} {i} {step}")
        words = draw.choices(range(2, 39), k=draw.randint(1, 11))
        drawn.append([3, 4, *words[:8], 1] if i % 3 else words)  # two of three begin alike
    return drawn


def drawing(library: Any, kind: str) -> type:
    """A trainer as a user writes one who brings completions."""

    def generate(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = complete(prompt_ids, self.state.global_step)
        return (drawn, None) if kind == "GRPO" else drawn

    return type(f"Drawing{kind}", (getattr(library, f"{kind}Trainer"),), {"_generate_single_turn": generate})


def make(library: Any, kind: str, folder: Any, trainer_class: type | None = None, **config: Any) -> Any:
    given = SETTINGS | {"per_device_train_batch_size": 8 if kind in ONLINE else 4} | config
    given |= {} if kind in ONLINE else {"max_length": 32}
    given |= {"eval_dataset": DEFAULTS[kind]["eval_dataset"]()}
    trainer_class = trainer_class or (drawing(library, kind) if kind in ONLINE else None)
    return make_trainer(library, kind, folder, trainer_class, **given)


CLOCK = ("runtime", "_per_second", "step_time", "total_flos", "profiling/", "perf/")


def trained(library: Any, kind: str, trainer_class: type | None = None, **config: Any) -> dict[str, list]:
    """Train: each metric's values, step after step; `None` where it was not logged, or is no number."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(library, kind, folder, trainer_class, **config)
        entered = entered_tokens(trainer.model)
        trainer.train()
    budget = config.get("max_tokens_per_batch")
    assert not budget or max(entered) <= budget
    logs = trainer.state.log_history
    ends = {"eval_loss": [x for x in logs if "eval_loss" in x], "train_loss": [x for x in logs if "train_loss" in x]}
    steps = [x for x in logs if "loss" in x]
    assert (len(steps), len(ends["eval_loss"])) == (STEPS, 2)
    columns = {}
    for name in sorted({name for log in logs for name in log} - {"step", "epoch"}):
        group = ends["eval_loss"] if name.startswith("eval_") else ends.get(name, steps)
        if not any(part in name for part in CLOCK):
            columns[name] = [rounded(log.get(name)) for log in group]
    return columns | {"epoch": [log["epoch"] for log in logs]}


def rounded(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(f"{value:.8g}")


# -- comparison


def tolerances(values: list[float | None]) -> list[float]:
    """
    What rounding may change in the values of a metric, one for each.

    A float32 operation errs by half of an epsilon. A layer is a chain of about 16 operations that pass errors on
    (2 norms, 7 products with sums of up to 64 terms, rotation, softmax, gate, 2 sums). Forward and backward, a
    number of one step errs by at most twice as many epsilons of its size: that of the metric, or 1, since metrics
    like margins are differences of log-probabilities, times beta of 0.1, of which each is some tens. SGD with
    clipped gradients hands a step's error on to the weights of the next: errors add up, step by step.
    """
    size = max([1.0, *(abs(value) for value in values if value is not None)])
    limit, step = 2 * 16 * LAYERS * torch.finfo(torch.float32).eps * size, STEPS / len(values)
    return [limit * (1 + (i + 1) * step) for i in range(len(values))]


def is_ours(name: str) -> bool:
    return name.removeprefix("eval_").startswith(("padfix/", "perf/"))


def distances(ours: dict[str, list], theirs: dict[str, list]) -> dict[str, float]:
    """The largest difference of each metric in tolerances; infinite where only one of both logs something."""
    ours, theirs = ({n: v for n, v in run.items() if not is_ours(n)} for run in (ours, theirs))
    found = dict.fromkeys(ours.keys() ^ theirs.keys(), math.inf)
    for name in ours.keys() & theirs.keys():
        pairs = list(zip(ours[name], theirs[name], tolerances(theirs[name]), strict=True))
        found[name] = max(
            0.0 if a is b is None else math.inf if a is None or b is None else abs(a - b) / limit
            for a, b, limit in pairs
        )
    return dict(sorted(found.items()))


def differences(ours: dict[str, list], cell: Cell) -> dict[str, float]:
    """The metrics that are neither TRL's nor, if the cell has a record of its own, that, with their distances."""
    record = json.loads(FILE.read_text())
    theirs, own = record["set-ups"][f"{cell.kind}-text"], record["cells"][cell.name]["other than TRL's"]
    far, beside = distances(ours, theirs), distances(ours, theirs | own)
    return {name: x for name, x in far.items() if min(x, beside[name]) > 1}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=c.name, marks=[] if c.name in FAST else [pytest.mark.slow]) for c in cells()],
)
def test_trajectory(cell: Cell) -> None:
    ours = trained(trl_padfix, cell.kind, **cell.config)
    assert differences(ours, cell) == {}
    if cell.mode != "padded":
        assert min(filter(None, ours["padfix/pad_fraction"])) > 0
    if cell.mode.startswith("sharing"):
        assert max(filter(None, ours["padfix/shared_fraction"])) > 0


def halved(library: Any) -> type:
    """SFT that computes a batch as two parts, one row and the others, and weighs both alike."""

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        parts = [{name: x[rows] for name, x in inputs.items()} for rows in (slice(1), slice(1, None))]
        loss = partial(library.SFTTrainer.compute_loss, self, model)
        return sum(loss(part, *args) for part in parts) / 2 if model.training else loss(inputs, *args, **kwargs)

    return type("Halved", (library.SFTTrainer,), {"compute_loss": compute_loss})


def distances_from_trls(kind: str, ours: dict[str, list]) -> dict[str, float]:
    return distances(ours, json.loads(FILE.read_text())["set-ups"][f"{kind}-text"])


def test_a_wrong_weight_of_a_part_is_noticed() -> None:
    far = distances_from_trls("SFT", trained(trl, "SFT", halved(trl)))
    assert min(far["loss"], far["grad_norm"]) > 10


@pytest.mark.parametrize("mode", ["padding-free", "prefix sharing"])
def test_a_leaking_layout_is_noticed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = break_mode(monkeypatch, mode) | {"parity_check": False}
    far = distances_from_trls("DPO", trained(trl_padfix, "DPO", **config))
    assert min(far["loss"], far["grad_norm"], far["eval_loss"]) > 10


# -- the record


def write() -> None:
    versions = {library.__name__: library.__version__ for library in (torch, transformers, trl)}
    record: dict[str, Any] = {"made by": COMMAND, "versions": versions, "set-ups": {}, "cells": {}}
    for kind in BUDGETS:
        record["set-ups"][f"{kind}-text"] = trained(trl, kind)
    for cell in cells():
        theirs, ours = record["set-ups"][f"{cell.kind}-text"], trained(trl_padfix, cell.kind, **cell.config)
        far = distances(ours, theirs)
        other = {name: ours.get(name, [None] * len(theirs.get(name, []))) for name, x in far.items() if x > 1}
        information = {name: values for name, values in ours.items() if is_ours(name)}
        record["cells"][cell.name] = {"other than TRL's": other, "information": information}
        print(cell.name, f"{max(far.values()):.3f}", sorted(other), flush=True)
        FILE.write_text(to_text(record))
    FILE.write_text(to_text(record))


def to_text(record: dict[str, Any]) -> str:
    """JSON with a line for each metric."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(record, indent=1)) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--write" in sys.argv:
        write()
    else:
        sys.exit(pytest.main(["-q", "-m", "slow or not slow", __file__, *sys.argv[1:]]))
