"""The conformance suite: its cases find planted leaks, and this package passes them."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

import pytest

from conformance.adapter import NotRun
from conformance.adapters.in_trl_padfix import ADAPTERS
from conformance.arbiter import CONTROL
from conformance.cases import CASES
from conformance.leaks import LEAKS
from conformance.table import table


ROOT = Path(__file__).parents[1]
OURS = {adapter.name: adapter for adapter in ADAPTERS}
BATCH_LENGTH = ("dynamic RoPE", "long RoPE")
"""Here the package keeps what transformers computes of the padded batch: frequencies of its longest row."""
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cases
def test_the_planted_leak_fails_its_case(case) -> None:
    found = case.run(LEAKS[case.leak], "qwen3")
    assert max(difference.tolerances for difference in found) >= CONTROL


@cases
@pytest.mark.parametrize("names", [
    ("padfix-remove-padding", "padfix-sft-padding-free", "padfix-dpo-left"),
    ("padfix-remove-padding-sharing", "padfix-sft-sharing", "padfix-dpo-right"),
], ids=["padding_free", "prefix_sharing"])  # fmt: skip
def test_the_package_passes(case, names: tuple[str, ...]) -> None:
    for name in names:  # `remove_padding` first, and a trainer for what only a trainer does
        with contextlib.suppress(NotRun):
            found = case.run(OURS[name], "qwen3")
            break
    leaks = any(difference.leaks for difference in found)
    assert leaks == (case.name in BATCH_LENGTH)


def test_the_page_has_the_figures_of_the_report() -> None:
    reports = json.loads((ROOT / "conformance" / "report.json").read_text())
    page = (ROOT / "docs" / "conformance.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    for shown in tables:
        names = shown.splitlines()[0].strip("| ").split(" | ")
        assert shown.strip() == table([report for report in reports if report["adapter"] in names])
    assert len(tables) == 2
