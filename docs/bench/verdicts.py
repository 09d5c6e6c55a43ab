"""
The speed-ups that `trl-padfix stats` would expect of the batches that were measured, beside those that were.

    python docs/bench/verdicts.py --data test.jsonl.gz

Reads the files of this folder: steps of TRL, padding-free and sharing, on HH-RLHF (`--data`, the file that they were
measured on), trees, short prompts and equal lengths. `--fit` looks for the four constants anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from trl_padfix.tools import bench, verdict
from trl_padfix.tools.tiny import BENCH_SHAPES


FILES = ["dpo-hh-rlhf-8-pairs-auto", "dpo-hh-rlhf-16-pairs", "sft-hh-rlhf-16-rows", "dpo-equal-lengths"]
FILES += ["sft-tree-4x8-600-80", "dpo-tree-4x8-600-80", "sft-short-prompts", "dpo-short-prompts"]
FILES += ["dpo-1024-256", "dpo-4096-512", "dpo-gsm8k-8-pairs", "sft-airline-32-rows"]


DATA = Path(__file__).parents[2] / "recipes/data"
SHIPPED = {"rollouts.jsonl.gz": DATA / "airline/rollouts.jsonl.gz", "pairs.jsonl.gz": DATA / "gsm8k/pairs.jsonl.gz"}


def counted(report: dict[str, Any], data: str) -> list[verdict.Verdict]:
    """The counts of the measured batches, of each as if it were all data."""
    known = {field.name for field in dataclasses.fields(bench.BenchSettings)}
    given = {k: tuple(v) if k == "variants" else v for k, v in report["settings"].items() if k in known}
    settings = bench.BenchSettings(**given | {"shape": "tiny"})  # the same rows, and a model that is made sooner
    hidden_size = BENCH_SHAPES[report["settings"]["shape"]]["hidden_size"]
    count = settings.pairs * (settings.warmup + settings.steps)
    described, _, spread = report["data"].partition(", spread ")
    if described.startswith("tree:"):
        make = bench.tree_rows if settings.trainer == "sft" else bench.tree_pairs
        rows = make(bench.parse_tree(described), count, seed=0)
    elif lengths := bench.parse_lengths(described):
        rows = bench.pairs_of_lengths(count, *lengths, float(spread))
    elif described == "equal":
        rows = bench.equal_length_pairs(count * 2)
    elif described in SHIPPED:
        rows = bench.load_examples(
            str(SHIPPED[described]), settings.trainer, expand_turns=settings.expand_turns, split="train"
        )
    else:
        rows = bench.load_examples(data)
    rows = verdict.tokenized(bench.prepare(rows, settings).rows)[settings.pairs * settings.warmup :]
    if "group_by_prefix" in settings.variants:  # its batches are made of all rows
        return [verdict.advise(rows, batch_size=settings.pairs, budget=0, hidden_size=hidden_size)]
    batches = [rows[i : i + settings.pairs] for i in range(0, settings.pairs * settings.steps, settings.pairs)]
    return [verdict.advise(b, batch_size=settings.pairs, budget=0, hidden_size=hidden_size) for b in batches]


def expected(found: list[verdict.Verdict], tokens: str) -> float:
    names = ["padded", "scored", "squares", *(n + of for n in ("real", "auto", "grouped") for of in ("", "_pairs"))]
    mean = {f: float(np.mean([getattr(v, f) for v in found])) for f in names}
    return dataclasses.replace(found[0], **mean).speed_of(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    cases: list[tuple[str, list[verdict.Verdict], str, float]] = []
    for name in FILES:
        report = json.loads((Path(__file__).parent / f"{name}-cpu.json").read_text())
        found = counted(report, options.data)
        for variant, tokens in (("padding_free", "real"), ("prefix_sharing", "auto"), ("group_by_prefix", "grouped")):
            speeds = [v["speedup"] for v in report["variants"] if v["name"] == variant]
            cases += [(f"{name}, {variant}", found, tokens, speed) for speed in speeds]

    def furthest() -> float:
        return max(abs(np.log(expected(found, tokens) / speed)) for _, found, tokens, speed in cases)

    if options.fit:
        errors = {}
        names = ("SCORING", "MASKED", "PACKED", "GROWTH")
        ranges = (np.arange(0.5, 1.0, 0.1), *(np.arange(0, 0.1, 0.01) for _ in names[1:]))
        for values in itertools.product(*ranges):
            vars(verdict).update(zip(names, values, strict=True))
            errors[values] = furthest()
        vars(verdict).update(zip(names, best := min(errors, key=errors.__getitem__), strict=True))
        print(", ".join(f"{name} = {value:.2f}" for name, value in zip(names, best, strict=True)))
    for name, found, tokens, speed in cases:
        formula = expected(found, tokens)
        print(f"{name:50} measured {speed:5.2f}, expected {formula:5.2f} ({formula / speed - 1:+.0%})")


if __name__ == "__main__":
    main()
