"""Formats a GPU report as tables in Markdown, for a README or an issue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


__all__ = ["NAMES", "gpu_table", "line_of", "load_report"]

NAMES = {
    "trl": "TRL, padded",
    "padding_free": "padding-free",
    "prefix_sharing": "prefix sharing",
    "prefix_sharing_compiled": "prefix sharing, compiled layers",
}
_COLUMNS = ("step", "variant", "tokens/s", "MFU", "x TRL", "token limit", "peak GiB", "launches", "waits (ours)")
_BITS = ("rows with equal bits", "of the model on the row alone", "of the same way on the row alone")


def load_report(path: Path) -> dict[str, Any]:
    """Read a report that `gpu_report.py` wrote; another file raises `ValueError`."""
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}). Give the file that `gpu_report.py` wrote.") from error
    if not isinstance(report, dict) or report.get("report") != "gpu":
        raise ValueError(f"{path} is no report on a GPU. Give the file that `gpu_report.py` wrote.")
    return report


def gpu_table(report: dict[str, Any]) -> str:
    """
    Tables of a report: times, and bits of rows; below them correctness, machine, versions, command, and the cells
    without a result.

    Raises:
        ValueError: If the report is of the simulated GPU: its figures say nothing about a GPU.
    """
    if report["device"] != "cuda":
        raise ValueError(
            "This report is a rehearsal on a simulated GPU, at toy size: its figures say nothing about a GPU, and no "
            "table is made of them. Run `python benchmarks/gpu_report.py` on a GPU."
        )
    times, bits, missing = [], [], []
    for cell in report["cells"]:
        for i, variant in enumerate(cell.get("variants", ())):
            # The name of the cell once, beside its first variant.
            times.append([cell["name"] if i == 0 else "", *_figures(variant)])
        for way, found in cell.get("bits", {}).items():
            counts = (f"{found[of]} of {found['rows']}" for of in ("of_model_alone", "of_same_way_alone"))
            bits.append([f"{cell['name'].partition(', ')[2]}, {way}", *counts])
        if cell["status"] not in ("right", "measured"):
            missing.append(f"{cell['name']} ({cell['status']})")
    without = ["", f"Wrong, or without a result: {'; '.join(missing)}."] if missing else []
    return "\n".join([*_table(_COLUMNS, times, 2), "", *_table(_BITS, bits, 1), "", _notes(report), *without])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> Iterator[str]:
    yield line_of(columns)
    yield line_of(["---"] * names + ["---:"] * (len(columns) - names))
    yield from map(line_of, rows)


def _figures(variant: dict[str, Any]) -> list[str]:
    return [
        NAMES.get(variant["name"]) or str(variant["name"]),
        f"{variant['tokens_per_second']:,.0f}",
        "unknown peak" if variant["mfu"] is None else f"{variant['mfu']:.2f}",
        f"{variant['speedup']:.2f}x",
        f"{variant['token_limit']:.2f}x",
        "-" if variant["peak_gib"] is None else f"{variant['peak_gib']:.1f}",
        f"{variant['launches']:,}",
        f"{variant['waits']} ({variant['own_waits']})",
    ]


def _notes(report: dict[str, Any]) -> str:
    """Number of checks, what MFU is, machine, versions, and the command with its duration."""
    machine, versions = report["machine"], report["versions"]
    stack = ", ".join(f"{name} {number}" for name, number in versions.items())
    commit = f", commit {report['commit']}" if report["commit"] else ""
    checks = [check for cell in report["cells"] for check in cell.get("checks", ())]
    duration = f"{report['seconds'] / 60:.0f} minutes{'' if report['complete'] else ', not finished'}"
    return (
        f"{sum(check['ok'] for check in checks)} of {len(checks)} checks of correctness passed. MFU: FLOPs of the "
        "matrix products and attention that the step computes, padding and recomputation included, over its time and "
        f"the peak of the data sheet. {machine.get('name')}, {machine.get('memory_gib')} GiB, CUDA "
        f"{machine.get('cuda')}; {stack}{commit}. Begun {report['begun']}, {duration}: `{report['command']}`."
    )


def line_of(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
