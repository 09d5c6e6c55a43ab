"""The conformance suite: its cases find planted leaks, and this package passes them."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from transformers import PreTrainedModel

from conformance.adapter import Adapter, NotRun
from conformance.adapters.in_trl_padfix import ADAPTERS
from conformance.arbiter import CONTROL, Difference, Row, Step, gradients
from conformance.cases import CASES, Case
from conformance.leaks import LEAKS
from conformance.run import outcome
from conformance.table import PAGE, REPORT, page


OURS = {adapter.name: adapter for adapter in ADAPTERS}
BATCH_LENGTH = ("dynamic RoPE", "long RoPE")
"""Here the package keeps what transformers computes of the padded batch: frequencies of its longest row."""

MODES_OF_PACKAGE = [
    ("padfix-remove-padding", "padfix-sft-padding-free", "padfix-dpo-left"),
    ("padfix-remove-padding-sharing", "padfix-sft-sharing", "padfix-dpo-right"),
]
"""Padding-free, and prefix sharing: `remove_padding` first, and a trainer for what only a trainer does."""


def run_first(case: Case, names: tuple[str, ...]) -> list[Difference]:
    for name in names:
        with contextlib.suppress(NotRun):
            return case.run(OURS[name], "qwen3")
    raise AssertionError(f"none of {names} runs {case.name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_package_passes_a_case_that_its_planted_leak_fails(case) -> None:
    for names in MODES_OF_PACKAGE:
        leaks = any(difference.leaks for difference in run_first(case, names))
        assert leaks == (case.name in BATCH_LENGTH)
    assert max(difference.tolerances for difference in case.run(LEAKS[case.leak], "qwen3")) >= CONTROL


class EachRowAlone(Adapter):
    """A stack that packs nothing and pads nothing; its loss is the cross-entropy alone."""

    name, setting, attention = "each-row-alone", "a loop over rows", "eager"

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        rows = [row for batch in batches for row in batch]
        labels, total = sum(row.targets() for row in rows), 0.0
        for row in (row for row in rows if row.targets()):
            logits = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:]), reduction="sum") / labels
            loss.backward()
            total += float(loss.detach())
        return Step(total, gradients(model))


def test_rows_that_are_computed_one_by_one_leak_nowhere() -> None:
    outcomes = {case.name: outcome(case, EachRowAlone(), "qwen3")["outcome"] for case in CASES}
    assert set(outcomes.values()) == {"ok", "not run"}
    assert outcomes["experts' balance"] == "not run"
    assert list(outcomes.values()).count("ok") > len(CASES) / 2


def test_the_page_has_the_figures_of_the_report() -> None:
    reports, text = json.loads(REPORT.read_text()), PAGE.read_text()
    assert page(text, reports) == text
    assert text.count("<!-- adapters: ") == 1
    wrong = json.loads(REPORT.read_text().replace('"outcome": "ok"', '"outcome": "LEAK"'))
    assert page(text, wrong) != text
