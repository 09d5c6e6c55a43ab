"""
The speed-ups that `trl-padfix stats` would expect of the batches that were measured, beside those that were.

    python docs/bench/verdicts.py --data test.jsonl.gz

Reads the files of this folder: steps of TRL, padding-free and sharing, on HH-RLHF (`--data`, the file that they were
measured on), trees, short prompts and equal lengths, of the default shape. `--fit` looks for the two constants anew.
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


FILES = ["dpo-hh-rlhf-8-pairs-auto", "dpo-hh-rlhf-16-pairs", "sft-hh-rlhf-16-rows", "dpo-equal-lengths"]
FILES += ["sft-tree-4x8-600-80", "dpo-tree-4x8-600-80", "sft-short-prompts", "dpo-short-prompts"]


DATA = Path(__file__).parents[2] / "recipes/data"
SHIPPED = {"rollouts.jsonl.gz": DATA / "airline/rollouts.jsonl.gz", "pairs.jsonl.gz": DATA / "gsm8k/pairs.jsonl.gz"}


def counted(report: dict[str, Any], data: str) -> list[verdict.Verdict]:
    """The counts of the measured batches, of each as if it were all data."""
    known = {field.name for field in dataclasses.fields(bench.BenchSettings)}
    given = {k: tuple(v) if k == "variants" else v for k, v in report["settings"].items() if k in known}
    settings = bench.BenchSettings(**given | {"shape": "tiny"})  # the same rows, and a model that is made sooner
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
        load = bench.load_dialogues if settings.expand_turns else bench.load_pairs
        rows = load(str(SHIPPED[described]), **{"expand_turns": True} if settings.expand_turns else {})
    else:
        rows = bench.load_pairs(data)
    rows = verdict.tokenized(bench.prepare(rows, settings).rows)[settings.pairs * settings.warmup :]
    if "group_by_prefix" in settings.variants:  # its batches are made of all rows
        return [verdict.advise(rows, batch_size=settings.pairs, budget=0)]
    batches = [rows[i : i + settings.pairs] for i in range(0, settings.pairs * settings.steps, settings.pairs)]
    return [verdict.advise(batch, batch_size=settings.pairs, budget=0) for batch in batches]


def expected(found: list[verdict.Verdict], tokens: str) -> float:
    mean = {f: float(np.mean([getattr(v, f) for v in found])) for f in ("padded", "scored", "real", "auto", "grouped")}
    # `auto` and `grouped` alike: what is computed in these very batches.
    only = dataclasses.replace(
        found[0], padded=mean["padded"], scored=mean["scored"], auto=mean[tokens], grouped=mean[tokens]
    )
    return only.speed


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
        for scoring, growth in itertools.product(np.arange(0.3, 1.2, 0.05), np.arange(0, 0.3, 0.01)):
            verdict.SCORING, verdict.GROWTH = scoring, growth
            errors[scoring, growth] = furthest()
        verdict.SCORING, verdict.GROWTH = min(errors, key=errors.__getitem__)
        print(f"SCORING = {verdict.SCORING:.2f}, GROWTH = {verdict.GROWTH:.2f}")
    for name, found, tokens, speed in cases:
        formula = expected(found, tokens)
        print(f"{name:50} measured {speed:5.2f}, expected {formula:5.2f} ({formula / speed - 1:+.0%})")


if __name__ == "__main__":
    main()
