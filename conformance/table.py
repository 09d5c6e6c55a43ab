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
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
REPORT, PAGE = HERE / "report.json", HERE.parent / "docs" / "conformance.md"
MARKED = re.compile(r"(<!-- adapters: ([^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)
"""A comment with names of adapters, and what is written from their reports."""

FIGURES = {"loss", "gradient", "allowed"}


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
    """Cases in rows, adapters in columns; below it what is ok everywhere, and what leaks everywhere."""
    outcomes = {r["adapter"]: {row["case"]: cell(row) for row in r["cases"]} for r in reports}
    computed = {name: [c for c in cells.values() if c not in ("", "stops")] for name, cells in outcomes.items()}
    leaks = {r["adapter"]: [row for row in r["cases"] if row["outcome"] == "LEAK"] for r in reports}
    always = [name for name in outcomes if leaks[name] and len(leaks[name]) == len(computed[name])]
    never = [name for name, cells in outcomes.items() if set(cells.values()) <= {"", "ok"}]
    names = [name for name in outcomes if name not in (*always, *never)]
    others = [name for name in outcomes if name not in always]
    lines, passed = [["", *names], ["---"] * (len(names) + 1)], []
    for case in dict.fromkeys(case for cells in outcomes.values() for case in cells):
        found = {outcomes[name].get(case, "") for name in others}
        if found - {"", "ok"}:
            lines.append([case, *(outcomes[name].get(case, "") for name in names)])
        elif "ok" in found:
            passed.append(case)
    below = [f"ok wherever computed: {'; '.join(passed)}"] if passed else []
    below += [f"ok in every case: {', '.join(f'`{name}`' for name in never)}"] if never else []
    for name in always:
        low, high = (bound(row["loss"] for row in leaks[name]) for bound in (min, max))
        below.append(f"leaks in every case: `{name}` ({low:.2g} to {high:.2g} nats)")
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + "\n\n" + "\n".join(f"- {line}." for line in below)


def page(text: str, reports: list[dict[str, Any]]) -> str:
    """The page with its tables written again."""
    by_name = {report["adapter"]: report for report in reports}
    return MARKED.sub(lambda m: f"{m[1]}\n{table([by_name[name] for name in m[2].split()])}\n\n{m[3]}", text)


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
