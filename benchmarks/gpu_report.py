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
One command that checks and measures a GPU, in a clone of the repository: ten minutes at most.

    uv run benchmarks/gpu_report.py                            # installs what it needs beside the clone's package
    pipx run benchmarks/gpu_report.py                          # the same
    python benchmarks/gpu_report.py                            # where the package is installed
    python benchmarks/gpu_report.py --rehearse                 # all cells at toy size, on the tests' simulated GPU
    python benchmarks/gpu_report.py --table gpu-report.json    # prints the table of a file again

It writes gpu-report.json, which a pull request brings, and prints its table. The cells run in this order: varlen
kernels against float64, packed models against padded ones, the bits of rows, times of steps.

Cells run in another process. After a cell that fails, crashes or exceeds its time the next one gets a new process, so
that a kernel that faults spoils its own cell only. The file is written after every cell; called again with the same
file, the command runs the cells that have no result yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this clone

from bench import Settings, WrongNumbersError, commit, select_rows
from gpu_cells import Cell, NotInstalledError, on_device, plan_of
from gpu_table import gpu_table, load_report

from trl_padfix import __version__
from trl_padfix.versions import installed_version


__all__ = ["BUDGET", "main", "measure_gpu"]

FORMAT = 2
"""Version of the file; raised when a field changes its meaning."""

BUDGET = 10 * 60
"""Default time limit of a report, in seconds."""

PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "flash-attn", "triton")

STARTED = 120
"""Seconds in which a new process must have imported torch and TRL."""

DONE = ("right", "wrong", "measured")
"""Statuses of cells that are not run again."""


def measure_gpu(
    path: Path,
    plan: Sequence[Cell],
    *,
    device: str = "cuda",
    data: str | None = None,
    budget: float = BUDGET,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """
    Run the cells of a plan, and write a report.

    Args:
        path (`Path`):
            File to write. Cells that have a result in it already are not run again.
        plan (`Sequence[Cell]`):
            Cells of [`plan_of`].
        device (`str`):
            `"cuda"`, or `"simulated"` for a toy plan.
        data (`str`, *optional*):
            Data that the plan was made with.
        budget (`float`):
            Time limit in seconds. A cell is not begun with less than half of its own limit left.
        say (`Callable`):
            Called with a line about every cell.

    Returns:
        `dict`: The report.

    Raises:
        ValueError: If `path` holds the report of other versions or of another machine.
    """
    begin, worker = time.monotonic(), _Worker()
    report = _describe(device, data, budget)
    try:
        report["machine"] = worker.run(Cell("machine", machine, 30, device))
        earlier = _resumed(path, report)
        for cell in plan:
            since = time.monotonic()
            left = begin + budget - since
            if cell.name in earlier:
                entry = earlier[cell.name]
            elif left < cell.seconds / 2:
                entry = {"status": "not measured: out of time"}
            else:
                entry = worker.run(replace(cell, seconds=min(cell.seconds, left)))
            report["cells"].append({"name": cell.name, "took": round(time.monotonic() - since, 1)} | entry)
            report["seconds"] = round(time.monotonic() - begin, 1)
            report["complete"] = len(report["cells"]) == len(plan)
            beside = path.with_name(f".{path.name}.partial")  # a file that is cut off could not be resumed
            beside.write_text(json.dumps(report, indent=2) + "\n")
            beside.replace(path)
            say(f"{cell.name}: {entry['status']} ({report['cells'][-1]['took']} s)")
    finally:
        worker.stop()
    return report


def _resumed(path: Path, report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of an earlier run that wrote the same file, by cell."""
    if not path.exists():
        return {}
    earlier = load_report(path)
    for name in ("format", "device", "machine", "versions", "commit", "data"):
        if earlier.get(name) != report[name]:
            raise ValueError(
                f"{path} has another {name}: {earlier.get(name)}, and now it is {report[name]}. Its figures cannot be "
                "mixed with new ones. Remove the file, or name another one by `--json`."
            )
    return {cell["name"]: cell for cell in earlier["cells"] if cell["status"].split(":")[0] in DONE}


class _Worker:
    """A process that runs cells, one after another; a new one after a cell that failed."""

    process: Any = None

    def run(self, cell: Cell) -> dict[str, Any]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_work, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()  # otherwise this end would not see that the process has ended
            if not self.pipe.poll(STARTED):
                self.stop()
                return {"status": f"failed: no process was ready within {STARTED} s"}
        entry = self._asked(cell)
        if entry["status"].startswith("failed"):
            self.stop()
        return entry

    def _asked(self, cell: Cell) -> dict[str, Any]:
        try:
            self.pipe.recv()  # the process is ready
            self.pipe.send(cell)
            if not self.pipe.poll(cell.seconds):
                return {"status": f"failed: not done after {cell.seconds:g} s"}
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            code = self.process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            return {"status": f"failed: its process ended by {how}"}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = None


def _work(pipe: Any) -> None:
    """Run the cells that come through a pipe."""
    import transformers

    transformers.logging.set_verbosity_error()
    while True:
        pipe.send("ready")
        try:
            cell = pipe.recv()
        except EOFError:
            return
        pipe.send(_outcome(cell))
        gc.collect()  # trainers and models are in reference cycles; their memory is needed by the next cell
        if cell.device == "cuda":
            torch.cuda.empty_cache()


def _outcome(cell: Cell) -> dict[str, Any]:
    """What a cell found, or why it found nothing."""
    try:
        with on_device(cell.device):
            return cell.run(cell.seconds)
    except NotInstalledError as error:
        return {"status": f"not measured: {error}"}
    except torch.OutOfMemoryError:
        return {"status": "not measured: out of memory (TRL's padded step is measured beside ours)"}
    except WrongNumbersError as error:
        return {"status": f"wrong: {error}"}
    except Exception as error:  # any other failure of a cell must not end the report
        lines = str(error).strip().splitlines()
        return {"status": f"failed: {type(error).__name__}: {lines[0] if lines else 'no message'}"}


def machine(seconds: float = 0) -> dict[str, Any]:
    """Name and sizes of the device, read in the process of the cells."""
    common = {"status": "measured", "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if torch.cuda.get_device_name() == "simulated":
        return {"name": "simulated GPU, toy size: says nothing about any GPU", **common}
    properties: Any = torch.cuda.get_device_properties(0)
    return {
        "name": torch.cuda.get_device_name(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        **common,
    }


def _describe(device: str, data: str | None, budget: float) -> dict[str, Any]:
    versions = {"trl_padfix": __version__, "python": platform.python_version()}
    versions |= {name: number for name in PACKAGES if (number := installed_version(name)) is not None}
    return {
        "report": "gpu",
        "format": FORMAT,
        "complete": False,
        "device": device,
        "machine": {},
        "versions": versions,
        "commit": commit(),
        "command": shlex.join(["python", "benchmarks/gpu_report.py", *sys.argv[1:]]),
        "begun": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": data,
        "budget_seconds": budget,
        "seconds": 0.0,
        "cells": [],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 1 if a cell is wrong or failed."""
    parser = argparse.ArgumentParser(description="Check and measure a GPU, or print the table of a report.")
    parser.add_argument("--rehearse", action="store_true", help="run all cells at toy size on the simulated GPU")
    parser.add_argument("--data", help="preference pairs, as for `bench.py`; by default random ones")
    parser.add_argument("--budget", type=float, default=BUDGET / 60, help="minutes in all; by default %(default)g")
    parser.add_argument("--json", type=Path, default=Path("gpu-report.json"), help="file to write, or to complete")
    parser.add_argument("--table", type=Path, help="print the table of this report, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table is not None:
        try:
            print(gpu_table(load_report(options.table)))
        except (OSError, ValueError) as error:
            parser.error(f"--table: {error}")
        return 0
    if not options.rehearse and not torch.cuda.is_available():
        parser.error(
            "There is no CUDA GPU here, or this torch was built without CUDA. Run it where one is, or see all cells "
            "run at toy size with `--rehearse`; that says nothing about a GPU."
        )
    try:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--json: {error}")
    try:
        # Data that cannot be read must be an error here, not one in every cell.
        if options.data is not None:
            select_rows(options.data, Settings())
    except (OSError, ValueError) as error:
        parser.error(f"--data: {error}")
    plan = plan_of(toy=options.rehearse, data=options.data)
    device, budget = "simulated" if options.rehearse else "cuda", 60 * options.budget
    try:
        report = measure_gpu(options.json, plan, device=device, data=options.data, budget=budget, say=print)
    except ValueError as error:
        parser.error(f"--json: {error}")
    print(f"Written to {options.json}. This was no GPU." if options.rehearse else gpu_table(report))
    return int(any(cell["status"].startswith(("wrong", "failed")) for cell in report["cells"]))


if __name__ == "__main__":
    sys.exit(main())
