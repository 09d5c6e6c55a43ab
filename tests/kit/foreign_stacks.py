"""What the tests of other stacks' own entry points share: a tiny model and data on disk, and what a run has logged."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch

from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


TEXTS = ["".join(chr(97 + (7 * i + j) % 26) for j in range(3)) for i in range(40)]
STEPS = 10


def words(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(TEXTS, k=draw.randint(low, high)))


def save_model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen2 and its tokenizer, as a model folder; its weights are large, so that attention is sharp."""
    tokenizer = train_tokenizer([" ".join(TEXTS)] * 3, vocab_size=400)
    torch.manual_seed(seed)
    model = build_qwen2(tokenizer, **SHAPES["tiny"] | {"vocab_size": len(tokenizer), "initializer_range": 0.1})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def preferences(count: int = 40, seed: int = 0) -> list[dict[str, str]]:
    """`prompt`, `chosen`, `rejected`, of very different lengths."""
    draw = random.Random(seed)
    return [
        {"prompt": words(draw, 4, 30), "chosen": words(draw, 1, 12), "rejected": words(draw, 1, 12)}
        for _ in range(count)
    ]


def run(*command: str, folder: Path, **environment: str) -> str:
    """The output of a command of the environment that the tests run in; a failure shows it."""
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def logged(output_dir: Path) -> list[dict[str, float]]:
    """What a trainer has logged, of its last checkpoint."""
    found = sorted(output_dir.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(found[-1].read_text())["log_history"]


def assert_equal_steps_of_fewer_tokens(ours: list[dict], theirs: list[dict], shares: bool = True) -> None:
    """The same losses and gradient norms in ten steps, and a log of what was not computed."""
    steps, expected = ([log for log in logs if "grad_norm" in log] for logs in (ours, theirs))
    assert len(steps) == len(expected) == STEPS
    for name in ("loss", "grad_norm"):
        found, wanted = ([float(log[name]) for log in logs] for logs in (steps, expected))
        assert max(wanted) > 1e-3
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
    assert all("padfix/pad_fraction" not in log for log in theirs)
    assert all(0 < log["padfix/pad_fraction"] < 1 for log in steps)
    assert all((log["padfix/shared_fraction"] > 0) is shares for log in steps)
