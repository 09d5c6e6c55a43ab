"""
A training step of TRL's, padded and packed, side by side: DPO's, SFT's, or GRPO's on completions that are given.

One TRL trainer, one policy, one reference, the same rows: what changes between variants is what is attached to the
models and, for those that batch otherwise, which rows go together. Steps are interleaved batch by batch, so that a
machine that drifts drifts for all of them. Losses and gradients of the variants must agree, or the run fails.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from ...core.call.layout_of import LayoutKey
from ...core.layout.build import prefix_sharing_layout
from ...core.version import __version__
from ...trainers.batching.bin_packing import split
from ...trainers.batching.prefix_groups import group_rows
from .building import build, computed_dtype
from .data import (
    equal_length_pairs,
    load_examples,
    pairs_of_lengths,
    parse_lengths,
    parse_tree,
    synthetic_rows,
    tree_pairs,
    tree_rows,
)
from .peak import Peak
from .settings import (
    TOLERANCE,
    TRAINERS,
    VARIANTS,
    BenchSettings,
    ImpossibleFigureError,
    Interrupted,
    Variant,
    VariantResult,
    WrongNumbersError,
)
from .steps import Step, attached, decoder_inputs, step_flops


__all__ = [
    "TOLERANCE",
    "TRAINERS",
    "BenchSettings",
    "ImpossibleFigureError",
    "Interrupted",
    "Variant",
    "VariantResult",
    "describe",
    "equal_length_pairs",
    "load_examples",
    "pairs_of_lengths",
    "parse_lengths",
    "parse_tree",
    "run",
    "synthetic_rows",
    "tree_pairs",
    "tree_rows",
]

Watch = Callable[[str, int, int], None]


def run(data: Dataset | None, settings: BenchSettings) -> list[VariantResult]:
    """
    Time all variants on the same random rows, in a format that the trainer takes or tokenized (SFT trains on what was
    chosen); GRPO draws prompts where it is given none. See [`measure`].
    """
    return measure(prepare(data, settings), settings)


def prepare(data: Dataset | None, settings: BenchSettings) -> Step:
    """The step that is measured, with the rows of all its batches."""
    return build(data, settings, settings.batch_rows * (settings.warmup + settings.steps))


def measure(
    step: Step, settings: BenchSettings, deadline: float | None = None, watch: Watch = lambda *_: None
) -> list[VariantResult]:
    """
    The figures of all variants, TRL's padded step first.

    No batch is begun after `deadline`, by `time.monotonic()`. `watch` is told before each step what is measured, how
    many steps are done, and of how many.

    Raises:
        WrongNumbersError: If losses or gradients of the variants differ.
        ImpossibleFigureError: If a step seems to do more than the device can. It holds the figures.
        TimeoutError: If no counted batch was done before the deadline.
        Interrupted: On Ctrl-C after a counted batch. It holds the figures of the batches until then; of variants with
            the same batches only, as after a deadline.
    """
    variants = [VARIANTS[name] for name in settings.variants]
    fixed = _in_parts(range(len(step.rows)), settings.batch_rows)
    warmup, counted = fixed[: settings.warmup], fixed[settings.warmup :]
    plans = {v.name: warmup + _batches(step, v, counted, settings) for v in variants}
    figures: dict[str, list[dict[str, float]]] = {v.name: [] for v in variants}
    # Norms, softmax and loss are computed in float32 whatever the rest is.
    dtypes = sorted({torch.float32, computed_dtype(settings.dtype)}, key=str)
    peak = Peak(settings.device, dtypes, settings.peak_tflops)
    peak.measure(times=2)
    extra = len(variants) if settings.memory and settings.device == "cpu" else 0  # steps in which memory is measured
    rounds, done, total = 0, 0, sum(map(len, plans.values())) + extra
    stopped: KeyboardInterrupt | None = None
    try:
        while rounds < max(map(len, plans.values())) and (deadline is None or time.monotonic() <= deadline):
            # Each variant is first, second and so on equally often.
            shift = rounds % len(variants)
            for variant in variants[shift:] + variants[:shift]:
                if rounds >= len(plans[variant.name]):
                    continue
                watch(variant.name, done, total)
                batch = _batch(step, variant, plans[variant.name][rounds])
                with attached(step, variant):
                    found = step.run(batch, variant)
                if rounds >= settings.warmup:
                    figures[variant.name].append(found | _counts(step, variant, batch))
                done += 1
            peak.measure()
            rounds += 1
    except KeyboardInterrupt as error:
        stopped = error
    if rounds < max(map(len, plans.values())):
        counted = counted[: max(0, rounds - settings.warmup)]
        variants = [v for v in variants if v.batching == "fixed"]
        figures = {v.name: figures[v.name][: len(counted)] for v in variants}
    if not counted:
        raise stopped or TimeoutError("No counted step was done in the time that there was.")
    _check_equal(figures, TOLERANCE[computed_dtype(settings.dtype)])
    fixed = _needed_flops(step, counted)  # other batches need other arithmetic: they share more, or less
    own = {v.name: _needed_flops(step, plans[v.name][settings.warmup :]) for v in variants if v.batching != "fixed"}
    needed = [own.get(v.name, fixed) for v in variants]
    results = [_result(v, figures, peak, flops, settings) for v, flops in zip(variants, needed, strict=True)]
    try:
        for variant, result in zip(variants, results, strict=True) if extra and not stopped else ():
            watch(f"memory of {variant.name}", done, total)
            largest = max(range(result.steps), key=lambda i: figures[variant.name][i]["tokens"])
            batch = _batch(step, variant, plans[variant.name][settings.warmup + largest])
            with attached(step, variant):
                result.peak_gib, result.kept_mib = step.peak_gib(batch, variant), step.kept_mib(batch, variant)
            done += 1
    except KeyboardInterrupt as error:
        stopped = error
    watch("done", done, total)
    peak.check(results)
    if stopped is not None:
        raise Interrupted(results) from stopped
    return results


def _result(
    variant: Variant, figures: dict[str, list[dict[str, float]]], peak: Peak, needed: float, settings: BenchSettings
) -> VariantResult:
    """What the steps of a variant come to, beside TRL's; on CPU without memory."""
    found, baseline = figures[variant.name], figures["trl"]
    seconds = [f["seconds"] for f in found]
    tokens = int(sum(f["tokens"] for f in found))
    on_gpu = settings.memory and settings.device == "cuda"
    return VariantResult(
        name=variant.name,
        seconds=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        speedup=_speedup(variant, baseline, found),
        steps=len(found),
        tokens=tokens,
        tokens_per_second=sum(f["real"] for f in found) / sum(seconds),
        token_limit=sum(f["tokens"] for f in baseline) / tokens,
        mfu=peak.share(needed, sum(seconds)),
        loss=_weighted(found, "loss"),
        grad_norm=statistics.mean(f["grad_norm"] for f in found),
        step_seconds=[round(s, 6) for s in seconds],
        peak_gib=max(f["peak_gib"] for f in found) if on_gpu else None,
    )


def profile(step: Step, settings: BenchSettings) -> dict[str, str]:
    """Where a step's time goes, for each variant on the first fixed batch: tables by the profiler."""
    tables = {}
    for variant in (VARIANTS[name] for name in settings.variants):
        with attached(step, variant):
            tables[variant.name] = step.profile(_batch(step, variant, list(range(settings.batch_rows))), variant)
    return tables


def describe(settings: BenchSettings, data: str) -> dict[str, Any]:
    """What a figure needs beside it: settings, machine and versions."""
    device = torch.cuda.get_device_name() if settings.device == "cuda" else platform.processor() or platform.machine()
    return {
        "data": data,
        "settings": asdict(settings),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {
            "trl_padfix": __version__,
            **{package.__name__: package.__version__ for package in (torch, transformers, trl)},
            "python": platform.python_version(),
        },
    }


def _batches(step: Step, variant: Variant, counted: list[list[int]], settings: BenchSettings) -> list[list[int]]:
    """The counted rows in the batches of a variant."""
    if variant.batching == "fixed":
        return counted
    rows = [i for batch in counted for i in batch]
    if variant.batching == "packed":
        packed = _packed_by_trl([len(step.rows[i]["input_ids"]) for i in rows], settings.max_length)
        each = max(1, len(packed) // len(counted))  # packed rows of a batch
        batches = [[rows[i] for part in parts for i in part] for parts in _in_parts(packed, each)]
    elif variant.batching == "grouped":
        batches = _in_parts(sorted(rows, key=lambda i: _longest(step.rows[i]), reverse=True), settings.pairs)
    else:
        costs = settings.measure(sharing=bool(variant.shares)).examples([step.rows[i] for i in rows])
        if variant.batching == "prefix":
            parts = _in_parts(group_rows(range(len(rows)), costs, settings.pairs).tolist(), settings.pairs)
        else:
            parts = split(costs, settings.max_tokens_per_batch or int(costs.each.sum() / len(counted)))
        batches = [[rows[i] for i in part] for part in parts]
    random.Random(settings.seed).shuffle(batches)
    return batches


def _in_parts(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _packed_by_trl(lengths: list[int], max_length: int) -> list[list[int]]:
    """Which rows TRL's `packing=True` lays behind one another in each row of at most `max_length` tokens."""
    numbered = Dataset.from_dict({"input_ids": [[i] * length for i, length in enumerate(lengths)]})
    packed = trl.pack_dataset(numbered, max_length)
    starts = [[0, *accumulate(row)][:-1] for row in packed["seq_lengths"]]
    return [[ids[start] for start in at] for ids, at in zip(packed["input_ids"], starts, strict=True)]


def _longest(row: dict[str, Any]) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def _batch(step: Step, variant: Variant, rows: list[int]) -> dict[str, torch.Tensor]:
    # Padded, ours differs from TRL's only on the left.
    return step.batch(rows, "left" if variant.ours and not variant.packed else "right", flat=variant.flat)


def _counts(step: Step, variant: Variant, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    if variant.flat:
        tokens = real = batch["input_ids"].numel()
    else:
        ids, mask = decoder_inputs(batch).values()
        tokens, real = mask.numel(), int(mask.sum())
        if variant.packed:
            tokens = LayoutKey(ids, mask, shares=bool(variant.shares)).build().packed_tokens
    return {"tokens": tokens, "real": real, "weight": step.weight(batch)}


def _needed_flops(step: Step, counted: list[list[int]]) -> float:
    total = 0.0
    for rows in counted:
        batch = step.batch(rows)
        scored = (batch["labels"][:, 1:] != -100).sum() if "labels" in batch else batch["completion_mask"].sum()
        total += step_flops(step, prefix_sharing_layout(**decoder_inputs(batch)), int(scored))
    return total


def _speedup(variant: Variant, baseline: list[dict[str, float]], found: list[dict[str, float]]) -> float:
    if variant.batching == "fixed":
        return statistics.median(t["seconds"] / f["seconds"] for t, f in zip(baseline, found, strict=True))
    return sum(t["seconds"] for t in baseline) / sum(f["seconds"] for f in found)


def _weighted(figures: list[dict[str, float]], quantity: str) -> float:
    return sum(f["weight"] * f[quantity] for f in figures) / sum(f["weight"] for f in figures)


def _check_equal(figures: dict[str, list[dict[str, float]]], tolerance: float) -> None:
    baseline = figures["trl"]
    for name, found in figures.items():
        values = []
        if VARIANTS[name].batching == "fixed":
            for i, (ours, theirs) in enumerate(zip(found, baseline, strict=True)):
                values += [(f"step {i}", q, ours[q], theirs[q]) for q in ("loss", "grad_norm")]
        for quantity in ("loss", "grad_projection"):
            values.append(("all rows", quantity, _weighted(found, quantity), _weighted(baseline, quantity)))
        for where, quantity, ours, theirs in values:
            scale = baseline[0]["grad_norm"] if quantity == "grad_projection" else abs(theirs)
            difference = abs(ours - theirs) / scale
            if not difference <= tolerance:
                raise WrongNumbersError(
                    f"{name} is not the same computation: in {where} its {quantity} is {ours:.6g} and TRL's "
                    f"{theirs:.6g}, {difference:.1e} apart (at most {tolerance:.0e})."
                )
