"""The conformance suite: its cases find planted leaks, and this package passes them."""

from __future__ import annotations

import contextlib
import copy
import gc
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.trainer_runs import break_mode
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel
from zoo import families
from zoo.family_outcomes import stable_topk

import conformance.cases
from conformance.adapter import Adapter, NotRun, backward
from conformance.adapters.in_trl_padfix import ADAPTERS, SFT, RemovePadding
from conformance.arbiter import CONTROL, IGNORED, Difference, Row, Step, alone, gradients, preferences
from conformance.cases import CASES, Case, rows
from conformance.families import VOCABULARY
from conformance.leaks import LEAKS
from conformance.run import outcome
from conformance.table import PAGE, REPORT, page
from trl_padfix import PaddingRemovalError, remove_padding


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


# -- every family of the families' table


class OfLogits(RemovePadding):
    """The loss of next tokens from the logits: some models (BART) expect labels that are shifted already."""

    def step(self, model: PreTrainedModel, batches: list[list[Row]]) -> Step:
        (batch,) = batches
        columns = [[torch.tensor(x) for x in (row.ids, row.labels, [1] * len(row.ids))] for row in batch]
        ids, labels, mask = (
            pad_sequence(list(column), batch_first=True, padding_value=value)
            for column, value in zip(zip(*columns, strict=True), (0, IGNORED, 0), strict=True)
        )
        return self.padded_step(model, ids, mask, labels=labels)

    def padded_step(self, model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor) -> Step:
        with remove_padding(model, prefix_sharing=self.prefix_sharing):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            labels = more["labels"][:, 1:].flatten()
            return backward(model, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels))


SMALLER = {"xlstm": {"num_blocks": 2}}
"""Changes of configs of the table: the tolerance of a model is that of `num_hidden_layers`: here 2, and not 32."""


def build_family(family: str, attention: str | None = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the families' table without dropout, with a vocabulary for the rows of the cases and its own head."""
    model_type, given = families.VARIANTS.get(family, (family, SMALLER.get(family, {})))
    return families.build_type(model_type, {**given, "tie_word_embeddings": False, **changes}, attention).eval()


RECORD = json.loads((Path(__file__).parent / "core" / "families.json").read_text())
MODES = {"padding_free": False, "prefix_sharing": True}
SIZES_OF_VOCABULARY = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "n_words")
OF_FAMILIES = [
    _CASES["neighbours"],
    # Rows of one token and of many windows, in all more tokens than the models have positions.
    replace(_CASES["row alone"], rows=rows(9, 50, 1, 14, 3)),
    _CASES["shared prefix"],
]
"""What can differ between families; labels, shapes of batches and accumulation are the same code in all."""


@pytest.fixture
def _family_models(monkeypatch) -> Iterator[None]:
    """Cases on models of the families' table, each of which is built once, and the rows alone are computed once."""
    models: dict[str, PreTrainedModel] = {}
    steps: dict[str, Step] = {}

    def build(family: str, attention: str | None, seed: int) -> PreTrainedModel:
        if family not in models:
            models[family] = build_family(family, attention, seed)
        return copy.deepcopy(models[family])

    def once(model: PreTrainedModel, rows: list[Row]) -> Step:
        name = repr((model.config.model_type, rows))
        if name not in steps:
            steps[name] = alone(model, rows)
        return steps[name]

    monkeypatch.setattr(conformance.cases, "build", build)
    monkeypatch.setattr(conformance.cases, "alone", once)
    for name in SIZES_OF_VOCABULARY:
        monkeypatch.setitem(families._SIZE_OF, name, VOCABULARY)
    with stable_topk():  # which of two equal scores an indexer takes is open, and may depend on the length of a row
        yield


@pytest.mark.families
@pytest.mark.usefixtures("_family_models")
@pytest.mark.parametrize("family", [family for family, outcomes in RECORD.items() if "not_built" not in outcomes])
def test_every_family_passes_the_cases_or_is_refused(family) -> None:
    leaks: dict[str, list[Difference]] = {}
    for mode, sharing in MODES.items():
        adapter = OfLogits(family, sharing)
        if RECORD[family][mode]["outcome"] == "refused":
            with pytest.raises(PaddingRemovalError):
                OF_FAMILIES[0].run(adapter, family)
            continue
        found = {f"{mode}, {case.name}": case.run(adapter, family) for case in OF_FAMILIES}
        leaks |= {name: differences for name, differences in found.items() if any(d.leaks for d in differences)}
    assert not leaks


@pytest.mark.usefixtures("_family_models")
@pytest.mark.parametrize("case", OF_FAMILIES, ids=lambda case: case.name)
def test_a_family_that_leaks_fails_each_of_them(case, monkeypatch) -> None:
    assert not any(d.leaks for d in case.run(OfLogits("llama", False), "llama"))
    break_mode(monkeypatch, "padding-free")
    assert max(d.tolerances for d in case.run(OfLogits("llama", False), "llama")) >= CONTROL
