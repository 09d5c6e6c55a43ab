"""Formats a GPU report as a table in Markdown, for a README or an issue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


__all__ = ["NAMES", "gpu_table", "line_of", "load_report"]

NAMES = {
    "trl": "TRL, padded",
    "padding_free": "padding-free",
    "prefix_sharing": "prefix sharing",
    "prefix_sharing_compiled": "prefix sharing, compiled layers",
}
_COLUMNS = (
    "step", "variant", "tokens/s", "expected", "x TRL", "token limit", "share of limit", "peak GiB", "launches",
    "waits (ours)",
)  # fmt: skip


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
    Table of a report, and below it machine, versions, command, and the cells without figures.

    Raises:
        ValueError: If the report is of a CPU: its figures say nothing about a GPU.
    """
    if report["device"] != "cuda":
        raise ValueError(
            "This report was made on a CPU, at toy size, to see that the command works: its figures say nothing about "
            "a GPU, and no table is made of them. Run `python benchmarks/gpu_report.py` on a GPU."
        )
    rows, missing = [], []
    for cell in report["cells"]:
        if cell["status"] != "measured":
            missing.append(f"{cell['name']} ({cell['status']})")
            continue
        for i, variant in enumerate(cell["variants"]):
            # The name of the cell once, beside its first variant.
            rows.append([cell["name"] if i == 0 else "", *_figures(variant)])
    lines = [line_of(_COLUMNS), line_of(["---"] * 2 + ["---:"] * (len(_COLUMNS) - 2)), *map(line_of, rows)]
    return "\n".join([*lines, "", *_notes(report), *_missing(missing)])


def _figures(variant: dict[str, Any]) -> list[str]:
    counted = "launches" in variant  # only on CUDA
    waits = f"{variant['synchronisations']} ({variant['own_synchronisations']})" if counted else "not counted"
    return [
        NAMES.get(variant["name"]) or str(variant["name"]),
        f"{variant['tokens_per_second']:,.0f}",
        "unknown device" if variant.get("expected") is None else f"{variant['expected']:,.0f}",
        f"{variant['speedup']:.2f}x",
        f"{variant['token_limit']:.2f}x",
        f"{variant['speedup'] / variant['token_limit']:.2f}",
        "-" if variant["peak_gib"] is None else f"{variant['peak_gib']:.1f}",
        f"{variant['launches']:,}" if counted else "not counted",
        waits,
    ]


def _notes(report: dict[str, Any]) -> list[str]:
    """Machine, versions, number of checks, and the command with its duration."""
    machine, versions = report["machine"], report["versions"]
    stack = ", ".join(f"{name} {number}" for name, number in versions.items())
    commit = f", commit {report['commit']}" if report["commit"] else ""
    passed = sum(check["ok"] for check in report["checks"])
    duration = f"{report['seconds'] / 60:.0f} minutes{'' if report['complete'] else ', not finished'}"
    return [
        f"{machine['name']}, {machine['memory_gib']} GiB, CUDA {machine['cuda']}; {stack}{commit}. "
        f"{passed} of {len(report['checks'])} checks of correctness passed before it. Begun {report['begun']}, "
        f"{duration}: `{report['command']}`."
    ]


def _missing(missing: list[str]) -> list[str]:
    return ["", f"Without figures: {'; '.join(missing)}."] if missing else []


def line_of(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
