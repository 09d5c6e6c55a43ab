"""
Does your packing leak?

    python conformance/run.py                          the adapters that there are
    python conformance/run.py trl-sft-packing-bfd      one of them
    python conformance/run.py adapters/in_trl.py       all of a file, also of one of yours
    python conformance/run.py NAME --model qwen3_next  the cases of rows on another family
    python conformance/run.py NAME --model smollm2     the same on the model of a folder, for instance a real one
    python conformance/run.py NAME --case sinks
    python conformance/run.py NAME --json report.json
    python conformance/run.py NAME --bits              tokens that have the bits of their row alone; no outcome

The exit code is 0 only if nothing leaked, and something was computed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import logging
import math
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

from conformance.adapter import Adapter, NotRun  # noqa: E402
from conformance.arbiter import IGNORED, Row  # noqa: E402
from conformance.cases import CASES, Case, rows  # noqa: E402
from conformance.families import FAMILIES, build  # noqa: E402


def of_file(path: Path) -> list[Adapter]:
    """The adapters of a file: its list `ADAPTERS`."""
    if path.resolve().parent == HERE / "adapters":
        return importlib.import_module(f"conformance.adapters.{path.stem}").ADAPTERS
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ADAPTERS


def found(wanted: str) -> list[Adapter]:
    """Adapters of a file, or the one of a name. Files whose stack is not installed are left out of the search."""
    for path in (Path(wanted), HERE / wanted):
        if path.suffix == ".py" and path.exists():
            return of_file(path)
    adapters = []
    for path in sorted((HERE / "adapters").glob("in_*.py")):
        try:
            adapters += of_file(path)
        except (ImportError, RuntimeError) as error:  # a stack that is not here, or not all of it
            print(f"{path.name}: {error}", file=sys.stderr)
    return [adapter for adapter in adapters if wanted in ("", adapter.name)]


def outcome(case: Case, adapter: Adapter, family: str) -> dict[str, Any]:
    """What came of a case: `ok`, `LEAK`, `error` (it stopped, which is no wrong number) or `not run`."""
    row: dict[str, Any] = {"case": case.name, "model": case.family or Path(family).name}
    try:
        differences = case.run(adapter, family)
    except NotRun as reason:
        return row | {"outcome": "not run", "reason": str(reason)}
    except Exception as error:
        return row | {"outcome": "error", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    worst = max(differences, key=lambda d: d.tolerances if not math.isnan(d.tolerances) else math.inf)
    return row | {
        "outcome": "LEAK" if any(d.leaks for d in differences) else "ok",
        "loss": max(d.loss for d in differences),
        "gradient": max(d.gradient for d in differences),
        "allowed": worst.allowed,
    }


def report(adapter: Adapter, families: list[str], only: str | None) -> dict[str, Any]:
    """Run all cases, and print their table."""
    print(f"{adapter.name}: {adapter.setting}\n{adapter.versions()}\n")
    print(f"{'case':26} {'model':13} {'outcome':8} {'loss off':>9} {'gradient':>9}")
    rows = []
    for family in families:
        for case in CASES:
            other = family != families[0] or family not in FAMILIES
            if (other and case.family) or only not in (None, case.name):
                continue
            rows.append(row := outcome(case, adapter, family))
            figures = f"{row['loss']:9.1e} {row['gradient']:9.1e}" if "loss" in row else row["reason"]
            print(f"{row['case']:26} {row['model']:13} {row['outcome']:8} {figures}", flush=True)
    print()
    return {
        "adapter": adapter.name, "setting": adapter.setting, "versions": adapter.versions(),
        "date": time.strftime("%Y-%m-%d"), "cases": rows,
    }  # fmt: skip


def kept_bits(adapter: Adapter, family: str) -> tuple[int, int]:
    """Tokens whose loss beside other rows has the very bits of the stack's own loss of the row alone, of how many."""
    batch = rows(17, 24, 31, begin=[*range(4, 12)])  # at least 16 tokens: small products have kernels of their own

    def loss(chosen: list[Row]) -> float:
        return adapter.step(build(family, adapter.attention), [chosen]).loss  # a step may change its model

    kept = []
    for i, row in enumerate(batch):
        for place in range(1, len(row.ids), 3):
            # The loss of one label is that of its token.
            chosen = replace(row, labels=[label if j == place else IGNORED for j, label in enumerate(row.ids)])
            beside = [chosen if j == i else other.unlabelled() for j, other in enumerate(batch)]
            kept.append(loss(beside) == loss([chosen]))
    return sum(kept), len(kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", nargs="?", help="a name, or a file with a list ADAPTERS")
    parser.add_argument(
        "--model", default="qwen3", help=f"for the cases of rows: all, a folder, or one of {', '.join(FAMILIES)}"
    )
    parser.add_argument("--case", choices=[case.name for case in CASES], help="this case alone")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--bits", action="store_true", help="count the tokens with the bits of their row alone")
    given = parser.parse_args()
    if given.model not in (*FAMILIES, "all") and not Path(given.model).is_dir():
        parser.error(f"--model {given.model}: neither a family nor a folder")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    adapters = found(given.adapter or "")
    if given.adapter is None or not adapters:
        print("\n".join(f"{adapter.name:32} {adapter.setting}" for adapter in adapters or found("")))
        return 2
    families = [*FAMILIES] if given.model == "all" else [given.model]
    if given.bits:
        for adapter, family in itertools.product(adapters, families):
            try:
                shown = "{} of {} tokens".format(*kept_bits(adapter, family))
            except NotRun as reason:
                shown = f"not run: {reason}"
            print(f"{adapter.name:32} {family:13} {shown}", flush=True)
        return 0
    reports = [report(adapter, families, given.case) for adapter in adapters]
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1) + "\n")
    leaks = [(r["adapter"], row["case"]) for r in reports for row in r["cases"] if row["outcome"] == "LEAK"]
    for adapter, case in leaks:
        print(f"leaks: {adapter}, {case}")
    if silent := [r["adapter"] for r in reports if all(row["outcome"] not in ("ok", "LEAK") for row in r["cases"])]:
        print(f"nothing was computed: {', '.join(silent)}")
    return 1 if leaks else 2 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
