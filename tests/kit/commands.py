"""The command as a user types it, the model and the data to run it on, and the logs of a training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from typer.testing import CliRunner

from trl_padfix.cli.app import app
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


ROOT = Path(__file__).parents[2]


def trl_padfix_command(*arguments: str, env: dict[str, str] | None = None):
    env = {"COLUMNS": "120", "TERMINAL_WIDTH": "120", "NO_COLOR": "1"} | (env or {})
    return CliRunner().invoke(app, list(arguments), env=env, prog_name="trl-padfix")


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as the words of a command line."""
    return [str(word) for name, value in settings.items() for word in (f"--{name}", value)]


def run_script(*words: str) -> subprocess.CompletedProcess:
    """Run Python with these words in the root of the repository."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def launch_recipe(script: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script of `recipes/` as its pages say."""
    return run_script(f"recipes/{script}.py", *arguments, "--use_cpu", "true")


def logs_of(output: Path) -> list[dict[str, float]]:
    """The logs of a training, from its last checkpoint."""
    states = sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    return json.loads(states[-1].read_text())["log_history"]


def save_tiny_model(folder: Path, **shape: Any) -> Dataset:
    """Save a tiny Qwen2 with a tokenizer of the published pairs; returns 16 of these pairs."""
    pairs = load_dataset(str(ROOT / "recipes/data/preferences"), split="train[:16]")
    tokenizer = train_tokenizer((m["content"] for row in pairs for m in row["prompt"] + row["chosen"]), vocab_size=512)
    tokenizer.save_pretrained(folder)
    build_qwen2(tokenizer, **SHAPES["tiny"] | {"vocab_size": len(tokenizer)} | shape).save_pretrained(folder)
    return pairs
