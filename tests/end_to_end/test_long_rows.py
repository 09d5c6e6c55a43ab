"""
Rows of 32,768 tokens (or of `LONG_ROW_TOKENS`) on four processes: the loss and the gradients of one process, and a
share of its memory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from kit.cells import slow_but
from kit.processes import ROOT, run_processes


TOKENS = int(os.environ.get("LONG_ROW_TOKENS", "32768"))
TREE = ("--rows", "4", "--shared", str(TOKENS * 3 // 4))
CELLS = {
    "SFT": ("--rows", "1"),
    "SFT, a tree": TREE,
    "DPO, a tree": (*TREE, "--loss", "dpo"),
    "SFT, a tree, checkpointing": (*TREE, "--checkpointing"),
}


def figures_of(processes: int, saved: Path, cell: str, tokens: int = TOKENS) -> tuple[dict, dict]:
    """What the benchmark prints, and the loss and gradients that it saves."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    size = ["--tokens", str(tokens), "--hidden", "32", "--steps", "1"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "benchmarks/split_rows.py"), *size]
    done = run_processes([*command, *CELLS[cell], "--save", str(saved)], {}, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), torch.load(saved)


def apart(a: dict, b: dict) -> float:
    """The largest difference of a gradient, relative to that of its parameter."""
    pairs = [(a["gradients"][name], gradient) for name, gradient in b["gradients"].items()]
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("cell", slow_but([], CELLS))
def test_long_rows_have_the_gradients_of_one_process(cell, tmp_path):
    (one, expected), (four, found) = (figures_of(n, tmp_path / f"{n}.pt", cell) for n in (1, 4))
    assert one["packed_tokens"] == four["packed_tokens"] >= TOKENS
    assert (found["loss"] - expected["loss"]).abs() <= 1e-5 * expected["loss"].abs()
    assert apart(found, expected) <= 1e-4
    # The keys and values of fewer heads than processes are held twice.
    assert four["kept_mib"] < 0.5 * one["kept_mib"]


@pytest.mark.slow
@pytest.mark.matrix
def test_another_row_would_be_seen(tmp_path):
    (_, expected), (_, found) = (figures_of(1, tmp_path / f"{n}.pt", "SFT", n) for n in (2048, 2047))
    assert apart(found, expected) > 1e-2
