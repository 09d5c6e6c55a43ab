"""
The table of reports, as Markdown: `python conformance/table.py report.json ...`

A number is the difference of the losses, in nats, of what leaks (with `g`, of the gradients, where the loss is equal).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def cell(row: dict[str, Any] | None) -> str:
    if row is None or row["outcome"] == "not run":
        return ""
    if row["outcome"] == "error":
        return "stops"
    if row["outcome"] == "ok":
        return "ok"
    if row["loss"] > row["allowed"][0]:
        return f"**{row['loss']:.2g}**"
    return f"**g {row['gradient']:.2g}**"


def table(reports: list[dict[str, Any]]) -> str:
    """Cases in rows, adapters in columns; cases that none of them ran are left out."""
    names = [report["adapter"] for report in reports]
    found = {(row["case"], r["adapter"]): row for r in reports for row in r["cases"]}
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for case in dict.fromkeys(case for case, _ in found):
        cells = [cell(found.get((case, name))) for name in names]
        lines += [[case, *cells]] if any(cells) else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table([report for path in sys.argv[1:] for report in json.loads(Path(path).read_text())]))
