"""The conformance suite: its cases find planted leaks, and this package passes them."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import conformance.cases
from conformance.adapter import Adapter, NotRun
from conformance.adapters.in_trl_padfix import ADAPTERS, SFT
from conformance.arbiter import CONTROL, Difference, Row, Step, alone, gradients, preferences
from conformance.cases import CASES, Case
from conformance.leaks import LEAKS
from conformance.run import outcome
from conformance.table import PAGE, REPORT, page


_CASES = {case.name: case for case in CASES}
SMOLLM2 = os.environ.get("TRL_PADFIX_SMOLLM2", "")
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


# -- a real model


def rows_of_gsm8k() -> list[Row]:
    """A question of GSM8K, in a few words, with three answers, and two first sentences of other questions."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    with gzip.open(Path(__file__).parents[1] / "recipes/data/gsm8k/pairs.jsonl.gz", "rt") as file:
        others = [json.loads(file.readline())["prompt"].split(".")[0] + "." for _ in range(2)]
    question = "Q: How many eggs are in 3 boxes of 6?\nA: "
    texts = [question + answer for answer in ("18", "3 * 6 = 18.", "9, it is 3 + 6.")] + others
    return [Row.of(ids[:24]) for ids in tokenizer(texts)["input_ids"]]


BUDGET_AND_SHARING = SFT("budget, sharing", padding_free=True, prefix_sharing=True, max_tokens_per_batch=24)
PADDING_FREE, SHARING = (OURS[names[0]] for names in MODES_OF_PACKAGE)
REAL_CASES = {
    "row alone": [PADDING_FREE, OURS["padfix-sft-padding-free"], OURS["padfix-sft-budget"]],
    "shared prefix": [SHARING, OURS["padfix-sft-sharing"], BUDGET_AND_SHARING],
    "padded left": [PADDING_FREE],
    "padded right": [SHARING],
    "padded on both sides": [PADDING_FREE, SHARING],
    "neighbours": [SHARING],
    "pairs": [OURS["padfix-dpo-left"], OURS["padfix-dpo-right"]],
}
"""What is put through each case on a real model."""


@pytest.fixture(scope="module")
def last_alone() -> list[Any]:
    """The last rows and their step alone, the same in most cases: in float64 its gradients take a gigabyte."""
    return [None, None]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(not SMOLLM2, reason="TRL_PADFIX_SMOLLM2 names no folder of SmolLM2")
@pytest.mark.parametrize("name", REAL_CASES)
def test_a_real_model_passes_a_case_that_its_planted_leak_fails(name, last_alone, monkeypatch) -> None:
    """In float32, on rows of text; the pairs are ids that the tokenizer of the suite has words for."""

    def once(model: PreTrainedModel, rows: list[Row]) -> Step:
        if last_alone[0] != rows:
            last_alone[:] = None, None
            last_alone[:] = rows, alone(model, rows)
        return last_alone[1]

    pairs: list[Step] = []

    def once_of_pairs(*args: Any, **kwargs: Any) -> Step:
        return (pairs or pairs.append(preferences(*args, **kwargs)) or pairs)[0]

    monkeypatch.setattr(conformance.cases, "alone", once)
    monkeypatch.setattr(conformance.cases, "preferences", once_of_pairs)
    case = replace(_CASES[name], rows=rows_of_gsm8k(), family=None)
    for adapter in REAL_CASES[name]:
        assert not any(difference.leaks for difference in case.run(adapter, SMOLLM2)), adapter.name
        gc.collect()  # a trainer refers to itself, and to its model
    assert max(difference.tolerances for difference in case.run(LEAKS[case.leak], SMOLLM2)) >= CONTROL
