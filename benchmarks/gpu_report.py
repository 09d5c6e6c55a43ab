"""
One command for one GPU: is it right there, and how fast.

    python benchmarks/gpu_report.py                            # writes gpu-report.json, prints the table
    python benchmarks/gpu_report.py --table gpu-report.json    # prints the table of a file again

First packed batches are compared with padded ones, and nothing is timed if they differ. Then the cells of
[`plan_of`] are measured for as long as there is time; what there is no time, memory or package for is named. The
file is written anew after every check and cell, so nothing that was measured is lost.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from gpu_checks import Check, check_device
from gpu_counts import count_launches
from gpu_expected import count_step, expected_seconds, known_device
from gpu_plan import BUDGET, Cell, plan_of
from gpu_table import gpu_table, load_report

from trl_padfix import __version__
from trl_padfix.files import refuse_output, write_whole
from trl_padfix.tools.bench import load_examples, measure, pairs_of_lengths, parse_lengths, prepare
from trl_padfix.tools.bench.settings import VARIANTS, ImpossibleFigureError, Variant, WrongNumbersError
from trl_padfix.tools.bench.steps import Step
from trl_padfix.versions import installed_version


__all__ = ["main", "measure_gpu"]

FORMAT = 1
"""Of the file; raised when a field changes its meaning."""

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "liger-kernel", "flash-attn", "triton")

OUT_OF_TIME = "not measured: out of time"

SPREAD = 0.75
"""How far random lengths part from their mean: rows of chat data differ as much."""


def measure_gpu(
    path: Path,
    plan: Iterable[Cell],
    *,
    device: str = "cuda",
    data: str | None = None,
    pairs: Dataset | None = None,
    budget: float = BUDGET,
    backend: str | None = "inductor",
    checks: Callable[..., Iterable[Check]] = check_device,
    say: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """
    Check, measure, and write a report, which is returned too; `say` is told a line about every check and cell.

    `pairs` are those that `data` names, unless it gives lengths. A cell that would take longer than what is left of
    the `budget`, in seconds, is not begun; cells that are wrong or fail are in the report without figures.

    Raises:
        WrongNumbersError: If a comparison fails; the report up to there is in the file.
    """
    begin = time.monotonic()
    report = _describe(device, data, budget)

    def write() -> None:
        report["seconds"] = round(time.monotonic() - begin, 1)
        text = json.dumps(report, indent=2) + "\n"
        write_whole(path, lambda beside: beside.write_text(text))

    for check in checks(device, toy=device == "cpu", backend=backend):
        report["checks"].append({**asdict(check), "ok": check.ok})
        say(str(check))
        write()
        if not check.ok:
            raise WrongNumbersError(
                f"{check.name}: {check.figure:.3g} where {check.limit:.3g} is allowed (a wrong layout gives "
                f"{check.control}). Nothing was timed: figures of a wrong computation are worth nothing. Please open "
                f"an issue with {path}."
            )
    for cell in plan:
        since = time.monotonic()
        left = begin + budget - since
        rows, named = _rows(cell, pairs, data)
        found = _measured(cell, rows, left) | {"data": named}
        report["cells"].append({"name": cell.name, "settings": asdict(cell.settings), "seconds": 0.0, **found})
        report["cells"][-1]["seconds"] = round(time.monotonic() - since, 1)
        say(f"{cell.name}: {found['status']} ({report['cells'][-1]['seconds']} s)")
        write()
    report["complete"] = True
    write()
    return report


def _measured(cell: Cell, rows: Dataset | None, left: float) -> dict[str, Any]:
    """The figures of a cell, or why there are none."""
    settings = cell.settings
    missing = [name for name in cell.needs if find_spec(name) is None]
    if missing:
        return {"status": f"not measured: {', '.join(missing)} is not installed"}
    if left <= cell.seconds:
        return {"status": OUT_OF_TIME}
    # A cell on a slow device ends early, with fewer steps, rather than take the time of the others.
    deadline = time.monotonic() + min(left, max(2 * cell.seconds, 30.0))
    try:
        step = prepare(rows, settings)
        results = [asdict(result) for result in measure(step, settings, deadline)]
        if settings.device == "cuda":
            results = [result | _counted(step, VARIANTS[result["name"]]) for result in results]
    except TimeoutError:
        return {"status": OUT_OF_TIME}
    except torch.OutOfMemoryError:
        return {"status": "not measured: out of memory (TRL's padded step is measured beside ours)"}
    except (WrongNumbersError, ImpossibleFigureError) as error:
        return {"status": f"wrong: {error}"}
    except Exception as error:  # a cell that fails takes none of the others with it
        reason = str(error).strip().splitlines()
        return {"status": f"failed: {type(error).__name__}: {reason[0] if reason else 'no message'}"}
    finally:
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.empty_cache()
    return {"status": "measured", "variants": results}


def _counted(step: Step, variant: Variant) -> dict[str, Any]:
    """Launches and waits of a step, and the tokens per second that its counts allow on a device that is known."""
    device = known_device(torch.cuda.get_device_name())
    operations, real = count_step(step, variant)
    expected = None if device is None else real / expected_seconds(operations, device)
    return count_launches(step, variant) | {"expected": expected}


def _rows(cell: Cell, pairs: Dataset | None, data: str | None) -> tuple[Dataset | None, str]:
    """The pairs of a cell, and what they are."""
    if cell.lengths is None:
        return None, "random completions"
    if pairs is not None:
        return pairs, Path(str(data)).name
    count = cell.settings.pairs * (cell.settings.steps + cell.settings.warmup)
    given = data if data is not None else cell.lengths
    lengths: Any = parse_lengths(given)
    return pairs_of_lengths(count, *lengths, SPREAD, cell.settings.seed), f"{given}, spread {SPREAD:g}"


def _describe(device: str, data: str | None, budget: float) -> dict[str, Any]:
    versions = {"trl_padfix": __version__, "python": platform.python_version()}
    versions |= {name: number for name in PACKAGES if (number := installed_version(name)) is not None}
    return {
        "report": "gpu",
        "format": FORMAT,
        "complete": False,
        "device": device,
        "machine": _machine(device),
        "versions": versions,
        "commit": _commit(),
        "command": shlex.join(["python", "benchmarks/gpu_report.py", *sys.argv[1:]]),
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": data,
        "budget_seconds": budget,
        "seconds": 0.0,
        "checks": [],
        "cells": [],
    }


def _machine(device: str) -> dict[str, Any]:
    common = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if device == "cpu":
        return {"name": "CPU, toy size: says nothing about any GPU", **common}
    properties: Any = torch.cuda.get_device_properties(0)
    return {
        "name": torch.cuda.get_device_name(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        **common,
    }


def _commit() -> str | None:
    """The commit of the checkout, marked where files were changed; `None` of an archive."""
    where = Path(__file__).resolve().parents[1]
    if not (where / ".git").exists():
        return None
    try:
        run = lambda *command: subprocess.run(  # noqa: E731
            ["git", "-C", str(where), *command], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        return run("rev-parse", "HEAD") + (" with changes" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status: 1 if a computation is wrong or a cell failed."""
    parser = argparse.ArgumentParser(description="Check and measure a GPU, or print the table of a report.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the same plan at toy size")
    parser.add_argument("--data", help="preference pairs, as for `trl-padfix bench`; by default random ones")
    parser.add_argument("--budget", type=float, default=BUDGET / 60, help="minutes in all; by default %(default)g")
    parser.add_argument("--json", type=Path, default=Path("gpu-report.json"), help="file to write")
    parser.add_argument("--compile-backend", default="inductor", help="of compiled layers")
    parser.add_argument("--table", type=Path, help="print the table of this report, and measure nothing")
    given = parser.parse_args(arguments)
    if given.table is not None:
        try:
            print(gpu_table(load_report(given.table)))
        except (OSError, ValueError) as error:
            parser.error(f"--table: {error}")
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "There is no CUDA GPU here, or this torch was built without CUDA. Run it where one is, or see the plan "
            "run at toy size with `--device cpu`; that says nothing about a GPU."
        )
    if reason := refuse_output(given.json):
        parser.error(f"--json: {reason}")
    pairs = None
    try:
        if given.data is not None and parse_lengths(given.data) is None:
            pairs = load_examples(given.data)
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    plan = plan_of(toy=given.device == "cpu", backend=given.compile_backend)
    how = {"device": given.device, "data": given.data, "budget": 60 * given.budget, "backend": given.compile_backend}
    try:
        found = measure_gpu(given.json, plan, pairs=pairs, say=print, **how)
    except WrongNumbersError as error:
        print(f"STOPPED. {error}")
        return 1
    if given.device == "cuda":
        print(gpu_table(found))
    print(f"Written to {given.json}.{' This was a CPU.' if given.device == 'cpu' else ''}")
    return int(any(cell["status"].startswith(("wrong", "failed")) for cell in found["cells"]))


if __name__ == "__main__":
    sys.exit(main())
