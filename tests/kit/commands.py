"""The command as a user types it, and pairs to run it on."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import Dataset
from typer.testing import CliRunner

from trl_padfix.cli.app import app


def trl_padfix_command(*arguments: str, env: dict[str, str] | None = None):
    env = {"COLUMNS": "120", "TERMINAL_WIDTH": "120", "NO_COLOR": "1"} | (env or {})
    return CliRunner().invoke(app, list(arguments), env=env, prog_name="trl-padfix")


def build_pairs(count: int = 12) -> Dataset:
    """Ragged pairs that share the beginning of a prompt."""
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(["alpha", "beta", "gamma", "delta", "omega"], k=draw.randint(low, high)))

    prompts = [f"Question: {text(2, 12)}\nAnswer: " for _ in range(count)]
    return Dataset.from_list([{"chosen": prompt + text(1, 9), "rejected": prompt + text(1, 9)} for prompt in prompts])


def write_rollouts(path: Path) -> str:
    """Trials of tasks, with a call of a tool in each, all rows of a task behind one another."""
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {"room": "hall"}}}]
    rows = []
    for task, thing in enumerate(["key", "hat", "ring", "map", "ball", "cup"]):
        asked = [{"role": "user", "content": f"{'alpha ' * 40}find the {thing}"}]
        for trial in range(2):
            said = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "a hall"}]
            messages = [*asked, *said, {"role": "assistant", "content": "gamma " * (2 + trial + task)}]
            rows.append({"task": task, "trial": trial, "reward": float(trial), "messages": messages})
    Dataset.from_list(rows).to_json(path)
    return str(path)
