# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = [
#   "torch>=2.6",
#   "transformers==5.24.0",
#   "trl==1.16.0",
#   "datasets>=3",
#   "accelerate>=1.4",
#   "peft>=0.18",
#   "liger-kernel>=0.6; sys_platform == 'linux'",
#   "requests",
# ]
# ///
"""
One command that checks and measures a GPU, in a clone of the repository.

    uv run benchmarks/gpu_report.py                            # installs what it needs beside the clone's package
    pipx run benchmarks/gpu_report.py                          # the same
    python benchmarks/gpu_report.py                            # where the package is installed
    python benchmarks/gpu_report.py --table gpu-report.json    # prints the table of a file again

It writes gpu-report.json, which a pull request brings, and prints its table.

First packed batches are compared with padded ones; nothing is timed if they differ. Then the cells of [`plan_of`] are
measured until the time limit. Cells without enough time, memory or packages are named. The file is written again after
every check and cell, so an interrupted report keeps its figures.
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


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this clone

from bench import VARIANTS, BenchStep, Settings, Variant, WrongNumbersError, measure, prepare, select_rows
from gpu_checks import Check, check_device
from gpu_expected import count_launches, count_operations, expected_seconds, known_device
from gpu_plan import BUDGET, Cell, plan_of
from gpu_table import gpu_table, load_report

from trl_padfix import __version__
from trl_padfix.files import output_obstacle, write_whole
from trl_padfix.versions import installed_version


__all__ = ["main", "measure_gpu"]

FORMAT = 1
"""Version of the file; raised when a field changes its meaning."""

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "liger-kernel", "flash-attn", "triton")

OUT_OF_TIME = "not measured: out of time"


def measure_gpu(
    path: Path,
    plan: Iterable[Cell],
    *,
    device: str = "cuda",
    data: str | None = None,
    budget: float = BUDGET,
    backend: str | None = "inductor",
    checks: Callable[..., Iterable[Check]] = check_device,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """
    Check and measure a device, and write a report.

    Args:
        path (`Path`):
            File to write.
        plan (`Iterable[Cell]`):
            Cells of [`plan_of`].
        device (`str`):
            `"cuda"`, or `"cpu"` for a toy plan.
        data (`str`, *optional*):
            Preference pairs or `lengths:PROMPT/COMPLETION`, in place of the data of the cells.
        budget (`float`):
            Time limit in seconds. A cell that would take longer than the rest of it is not begun.
        backend (`str`, *optional*):
            Backend of `torch.compile` in the checks.
        checks (`Callable`):
            Checks to run first, as [`check_device`].
        say (`Callable`):
            Called with a line about every check and cell.

    Returns:
        `dict`: The report. Cells that are wrong or fail have no figures.

    Raises:
        WrongNumbersError: If a check fails; the file has the report until then.
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
        source = cell.data and (data or cell.data)
        entry = {"name": cell.name, "settings": asdict(cell.settings), "seconds": 0.0, "data": source or "random"}
        entry |= _measured(cell, source, begin + budget - since)
        entry["seconds"] = round(time.monotonic() - since, 1)
        report["cells"].append(entry)
        say(f"{cell.name}: {entry['status']} ({entry['seconds']} s)")
        write()
    report["complete"] = True
    write()
    return report


def _measured(cell: Cell, source: str | None, seconds_left: float) -> dict[str, Any]:
    """Status of a cell and, if it was measured, its figures. `source` names its rows, as for `select_rows`."""
    settings = cell.settings
    missing = [name for name in cell.needs if find_spec(name) is None]
    if missing:
        return {"status": f"not measured: {', '.join(missing)} is not installed"}
    if settings.liger and settings.device == "cpu":
        return {"status": "not measured: Liger's kernels need a GPU"}
    if seconds_left <= cell.seconds:
        return {"status": OUT_OF_TIME}
    # On a slow device a cell ends at its deadline with fewer steps, so that others have time left.
    deadline = time.monotonic() + min(seconds_left, max(2 * cell.seconds, 30.0))
    try:
        rows, name = select_rows(source, settings)
        step = prepare(rows, settings)
        results = [asdict(result) for result in measure(step, deadline)]
        if settings.device == "cuda":
            results = [result | _counted(step, VARIANTS[result["name"]]) for result in results]
    except TimeoutError:
        return {"status": OUT_OF_TIME}
    except torch.OutOfMemoryError:
        return {"status": "not measured: out of memory (TRL's padded step is measured beside ours)"}
    except WrongNumbersError as error:
        return {"status": f"wrong: {error}"}
    except Exception as error:  # any other failure of a cell must not end the report
        lines = str(error).strip().splitlines()
        return {"status": f"failed: {type(error).__name__}: {lines[0] if lines else 'no message'}"}
    finally:
        gc.collect()  # trainers and models are in reference cycles; their memory is needed by the next cell
        if settings.device == "cuda":
            torch.cuda.empty_cache()
    return {"status": "measured", "data": name, "variants": results}


def _counted(step: BenchStep, variant: Variant) -> dict[str, Any]:
    """Launches and waits of a step, and the tokens per second of the roofline if the device is known."""
    device = known_device(torch.cuda.get_device_name())
    operations, real = count_operations(step, variant)
    expected = None if device is None else real / expected_seconds(operations, device)
    return count_launches(step, variant) | {"expected": expected}


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
    """Commit of the checkout, and whether files were changed since; `None` without a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        run = lambda *command: subprocess.run(  # noqa: E731
            ["git", "-C", str(root), *command], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        return run("rev-parse", "HEAD") + (" with changes" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 1 if a check or a cell is wrong or failed."""
    parser = argparse.ArgumentParser(description="Check and measure a GPU, or print the table of a report.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the same plan at toy size")
    parser.add_argument("--data", help="preference pairs, as for `bench.py`; by default random ones")
    parser.add_argument("--budget", type=float, default=BUDGET / 60, help="minutes in all; by default %(default)g")
    parser.add_argument("--json", type=Path, default=Path("gpu-report.json"), help="file to write")
    parser.add_argument("--compile-backend", default="inductor", help="of compiled layers")
    parser.add_argument("--table", type=Path, help="print the table of this report, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table is not None:
        try:
            print(gpu_table(load_report(options.table)))
        except (OSError, ValueError) as error:
            parser.error(f"--table: {error}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "There is no CUDA GPU here, or this torch was built without CUDA. Run it where one is, or see the plan "
            "run at toy size with `--device cpu`; that says nothing about a GPU."
        )
    if reason := output_obstacle(options.json):
        parser.error(f"--json: {reason}")
    try:
        # Data that cannot be read must be an error here, not one in every cell.
        if options.data is not None:
            select_rows(options.data, Settings())
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    plan = plan_of(toy=options.device == "cpu", backend=options.compile_backend)
    try:
        report = measure_gpu(
            options.json,
            plan,
            device=options.device,
            data=options.data,
            budget=60 * options.budget,
            backend=options.compile_backend,
            say=print,
        )
    except WrongNumbersError as error:
        print(f"STOPPED. {error}")
        return 1
    if options.device == "cuda":
        print(gpu_table(report))
    print(f"Written to {options.json}.{' This was a CPU.' if options.device == 'cpu' else ''}")
    return int(any(cell["status"].startswith(("wrong", "failed")) for cell in report["cells"]))


if __name__ == "__main__":
    sys.exit(main())
