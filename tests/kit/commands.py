"""The command as a user types it, and pairs to run it on."""

from __future__ import annotations

import random

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
