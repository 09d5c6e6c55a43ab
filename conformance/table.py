"""
The tables of reports, as Markdown.

    python conformance/table.py new.json ...           of some reports
    python conformance/table.py --write new.json ...   put them into conformance/report.json, and both into the page

A number is the difference of the losses, in nats, of what leaks (with `g`, of the gradients, where the loss is equal).
"""

from __future__ import annotations

import json
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
REPORT, PAGE = HERE / "report.json", HERE.parent / "docs" / "conformance.md"
MARKED = re.compile(r"(<!-- adapters: ([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A comment with patterns of names of adapters, and what is written from their reports."""

EVERYWHERE = {"dynamic RoPE", "long RoPE"}
"""Cases in which each stack on transformers is wrong, or raises an error: the page has them below its table."""

RECURRENT = {"delta net", "delta net (Qwen3.5)", "Mamba 2", "short convolution"}
"""Cases of recurrent layers, which the table counts if two or more have one outcome."""

FIGURES = {"loss", "gradient", "allowed"}


def figure(row: dict[str, Any]) -> str:
    """How far a case that leaks is off."""
    if row["loss"] > row["allowed"][0]:
        return f"{row['loss']:.2g}"
    return f"g {row['gradient']:.2g}"


def between(rows: list[dict[str, Any]]) -> str:
    """The smallest and the largest figure of cases that leak."""
    low, high = (bound(row["loss"] for row in rows) for bound in (min, max))
    return f"**{low:.2g}** to **{high:.2g}**"


def listed(rows: list[dict[str, Any]]) -> str:
    """Cases of one outcome, with their figures if they leak. Two or more recurrent layers are one entry."""
    recurrent = [row for row in rows if row["case"] in RECURRENT]
    grouped = recurrent if len(recurrent) > 1 else []
    entries = [row["case"] if row["outcome"] == "error" else f"{row['case']} **{figure(row)}**" for row in rows]
    entries = [entry for entry, row in zip(entries, rows, strict=True) if row not in grouped]
    if grouped:
        figures = "" if grouped[0]["outcome"] == "error" else f" {between(grouped)}"
        entries.append(f"{len(grouped)} recurrent cases{figures}")
    return "; ".join(entries)


def table(reports: list[dict[str, Any]]) -> str:
    """Adapters in rows, those of equal results in one: how many cases are ok, which are wrong, which are errors."""
    names: dict[tuple[str, ...], list[str]] = {}
    for report in reports:
        cases = [row for row in report["cases"] if row["case"] not in EVERYWHERE]
        of = {kind: [row for row in cases if row["outcome"] == kind] for kind in ("ok", "LEAK", "error")}
        computed = sum(map(len, of.values()))
        errors, wrong = listed(of["error"]), listed(of["LEAK"])
        if wrong and not of["ok"]:
            wrong = f"every {'other ' if errors else ''}case, {between(of['LEAK'])}"
        cells = f"{len(of['ok'])} of {computed}", wrong, errors
        names.setdefault(cells, []).append(f"`{report['adapter']}`")
    lines = [("setting", "ok (of applicable)", "wrong", "error"), ("---",) * 4]
    lines += [(", ".join(adapters), *cells) for cells, adapters in names.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(text: str, reports: list[dict[str, Any]]) -> str:
    """The page with its tables written again."""

    def shown(patterns: list[str]) -> list[dict[str, Any]]:
        return [report for pattern in patterns for report in reports if fnmatch(report["adapter"], pattern)]

    return MARKED.sub(lambda m: f"{m[1]}\n{table(shown(m[2].split()))}\n\n{m[3]}", text)


def merged(reports: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reports with the `new` ones in the places of those of the same adapters; figures with two digits."""

    def short(value: Any) -> Any:
        return [short(x) for x in value] if isinstance(value, list) else float(f"{value:.2g}")

    by_name = {report["adapter"]: report for report in reports}
    for report in new:
        rows = [row | {key: short(row[key]) for key in FIGURES & row.keys()} for row in report["cases"]]
        by_name[report["adapter"]] = report | {"cases": rows}
    return list(by_name.values())


def line_by_line(reports: list[dict[str, Any]]) -> str:
    """JSON with a line for each case."""

    def lines(report: dict[str, Any]) -> str:
        head = json.dumps({key: value for key, value in report.items() if key != "cases"})
        cases = ",\n".join(f"  {json.dumps(row)}" for row in report["cases"])
        return f'{head[:-1]}, "cases": [\n{cases}\n]}}'

    return "[\n" + ",\n".join(map(lines, reports)) + "\n]\n"


def main() -> None:
    paths = [Path(path) for path in sys.argv[1:] if path != "--write"]
    new = [report for path in paths for report in json.loads(path.read_text())]
    if "--write" in sys.argv:
        reports = merged(json.loads(REPORT.read_text()), new)
        REPORT.write_text(line_by_line(reports))
        PAGE.write_text(page(PAGE.read_text(), reports))
    else:
        print(table(new))


if __name__ == "__main__":
    main()
