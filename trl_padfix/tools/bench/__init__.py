"""
A training step of TRL's, padded and packed, side by side: DPO's, SFT's, or GRPO's on completions that are given.

One TRL trainer, one policy, one reference, the same rows: what changes between variants is what is attached to the
models and, for those that batch otherwise, which rows go together. Steps are interleaved batch by batch, so that a
machine that drifts drifts for all of them. Losses and gradients of the variants must agree, or the run fails.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset

from ...core.layout import padding_free_layout, prefix_sharing_layout
from ...core.version import __version__
from ...trainers.row_costs import split
from ...trainers.row_measures import PairMeasure, TextMeasure
from .data import equal_length_pairs, load_pairs, pairs_of_lengths, parse_lengths
from .steps import Step, attached, build, computed_dtype, decoder_inputs, step_flops


__all__ = [
    "BenchSettings",
    "Variant",
    "VariantResult",
    "describe",
    "equal_length_pairs",
    "load_pairs",
    "pairs_of_lengths",
    "parse_lengths",
    "run",
    "to_json",
]

TRAINERS = ("dpo", "sft", "grpo")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient between variants."""


@dataclass(frozen=True)
class Variant:
    """
    A way to compute the same rows.

    Attributes:
        name (`str`): Its name.
        ours (`bool`): Whether it is this package's, or TRL's.
        packed (`bool`): Whether padding is removed.
        shares (`bool`): Whether prefixes are shared.
        batching (`str`): `"fixed"`, `"grouped"` (rows of like length together) or `"budget"` (by distinct tokens).
    """

    name: str
    ours: bool = True
    packed: bool = True
    shares: bool = False
    batching: str = "fixed"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("trl", ours=False, packed=False),
        Variant("trl_grouped", ours=False, packed=False, batching="grouped"),
        Variant("padded", packed=False),
        Variant("padding_free"),
        Variant("prefix_sharing", shares=True),
        Variant("token_budget", shares=True, batching="budget"),
    )
}


@dataclass(frozen=True)
class BenchSettings:
    """What is measured; every field is an option of `trl-padfix bench`."""

    trainer: str = "dpo"
    variants: tuple[str, ...] = ("trl", "padding_free", "prefix_sharing")
    pairs: int = 8
    generations: int = 8
    prompt_length: int = 512
    completion_length: int = 64
    steps: int = 10
    warmup: int = 2
    shape: str = "small"
    device: str = "cpu"
    dtype: str = "float32"
    attn: str = "sdpa"
    max_length: int = 1024
    max_tokens_per_batch: int | None = None
    lora: int = 0
    gradient_checkpointing: bool = False
    optimizer: bool = True
    memory: bool = True
    peak_tflops: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or self.variants[:1] != ("trl",):
            raise ValueError(
                f"`variants` are names among {', '.join(VARIANTS)}, TRL's own first, got {', '.join(self.variants)}."
            )
        if self.trainer == "grpo" and any(VARIANTS[name].batching != "fixed" for name in self.variants):
            raise ValueError("GRPO's batches are prompts with all their completions: they are not grouped otherwise.")


@dataclass
class VariantResult:
    """
    One variant over all counted rows.

    Attributes:
        seconds, low, high (`float`): Median, quickest and slowest step.
        speedup (`float`):
            Median over batches of TRL's step time over this one's; of a variant that batches otherwise, TRL's time for
            all rows over this one's.
        steps (`int`): Steps that all rows took.
        tokens (`int`): Tokens that entered the decoder per forward, over all rows.
        tokens_per_second (`float`): Real tokens of all rows over the time of all steps.
        token_limit (`float`): Tokens of TRL's padded batches over `tokens`: the speed-up if time went with them alone.
        mfu (`float`): Arithmetic that the distinct tokens need at the least ([`step_flops`]) over time and peak.
        peak_gib (`float`, *optional*): Peak memory of its largest step.
        loss (`float`): Mean over rows, for SFT over labelled tokens.
        grad_norm (`float`): Mean over steps.
    """

    name: str
    seconds: float
    low: float
    high: float
    speedup: float
    steps: int
    tokens: int
    tokens_per_second: float
    token_limit: float
    mfu: float
    peak_gib: float | None
    loss: float
    grad_norm: float
    step_seconds: list[float] = field(repr=False)


def run(data: Dataset | None, settings: BenchSettings) -> list[VariantResult]:
    """
    Time all variants on the same random rows.

    Args:
        data ([`~datasets.Dataset`], *optional*):
            Preference pairs, as text or tokenized; SFT trains on what was chosen. GRPO takes none: its completions are
            random.
        settings ([`BenchSettings`]):
            What to measure.

    Returns:
        `list[VariantResult]`, TRL's padded step first.

    Raises:
        RuntimeError: If losses or gradients of the variants differ.
    """
    return measure(prepare(data, settings), settings)


def prepare(data: Dataset | None, settings: BenchSettings) -> Step:
    """The step that is measured, with the rows of all its batches."""
    size = 1 if settings.trainer == "grpo" else settings.pairs
    return build(data, settings, size * (settings.warmup + settings.steps))


def measure(step: Step, settings: BenchSettings) -> list[VariantResult]:
    """The figures of all variants; see [`run`]."""
    variants = [VARIANTS[name] for name in settings.variants]
    size = 1 if settings.trainer == "grpo" else settings.pairs
    fixed = [list(range(i, i + size)) for i in range(0, len(step.rows), size)]
    warmup, counted = fixed[: settings.warmup], fixed[settings.warmup :]
    plans = {v.name: [[*w] for w in warmup] + _batches(step, v, counted, settings) for v in variants}
    figures: dict[str, list[dict[str, float]]] = {v.name: [] for v in variants}
    longest = max(len(plan) for plan in plans.values())
    for i in range(longest):
        # Each variant is first, second and so on equally often.
        shift = i % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            if i >= len(plans[variant.name]):
                continue
            batch = _batch(step, variant, plans[variant.name][i])
            with attached(step.models, variant):
                found = step.run(batch)
            if i >= settings.warmup:
                figures[variant.name].append(found | _counts(step, variant, batch))
    _check_equal(figures, TOLERANCE[computed_dtype(settings.dtype)])
    needed = _needed_flops(step, counted)
    peak = (settings.peak_tflops or _matmul_tflops(settings)) * 1e12
    baseline = figures[variants[0].name]
    padded = sum(f["tokens"] for f in baseline)
    results = []
    for variant in variants:
        found = figures[variant.name]
        seconds = [f["seconds"] for f in found]
        tokens = int(sum(f["tokens"] for f in found))
        results.append(
            VariantResult(
                name=variant.name,
                seconds=statistics.median(seconds),
                low=min(seconds),
                high=max(seconds),
                speedup=_speedup(variant, baseline, found),
                steps=len(found),
                tokens=tokens,
                tokens_per_second=sum(f["real"] for f in found) / sum(seconds),
                token_limit=padded / tokens,
                mfu=needed / sum(seconds) / peak,
                peak_gib=_peak_gib(step, variant, plans[variant.name][settings.warmup :], found, settings),
                loss=_weighted(found, "loss"),
                grad_norm=statistics.mean(f["grad_norm"] for f in found),
                step_seconds=[round(s, 4) for s in seconds],
            )
        )
    return results


def profile(step: Step, settings: BenchSettings) -> dict[str, str]:
    """Where a step's time goes, for each variant on the first fixed batch: tables by the profiler."""
    size = 1 if settings.trainer == "grpo" else settings.pairs
    tables = {}
    for name in settings.variants:
        with attached(step.models, VARIANTS[name]):
            tables[name] = step.profile(_batch(step, VARIANTS[name], list(range(size))))
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
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
            "python": platform.python_version(),
        },
    }


def to_json(results: list[VariantResult], about: dict[str, Any]) -> str:
    """The results with what they were measured on."""
    return json.dumps({**about, "variants": [asdict(r) for r in results]}, indent=2)


def _batches(step: Step, variant: Variant, counted: list[list[int]], settings: BenchSettings) -> list[list[int]]:
    """The counted rows in the batches of a variant."""
    if variant.batching == "fixed":
        return counted
    rows = [i for batch in counted for i in batch]
    if variant.batching == "grouped":
        rows.sort(key=lambda i: _longest(step.rows[i]), reverse=True)
        batches = [rows[i : i + settings.pairs] for i in range(0, len(rows), settings.pairs)]
    else:
        measure = TextMeasure() if settings.trainer == "sft" else PairMeasure(sharing=variant.shares)
        costs = measure.examples([step.rows[i] for i in rows])
        budget = settings.max_tokens_per_batch or int(costs.each.sum() / len(counted))
        batches = [[rows[i] for i in part] for part in split(costs, budget)]
    random.Random(settings.seed).shuffle(batches)
    return batches


def _longest(row: dict[str, Any]) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def _batch(step: Step, variant: Variant, rows: list[int]) -> dict[str, torch.Tensor]:
    # Padded, ours differs from TRL's only on the left.
    return step.batch(rows, "left" if variant.ours and not variant.packed else "right")


def _counts(step: Step, variant: Variant, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    inputs = decoder_inputs(batch)
    mask = inputs["attention_mask"]
    tokens = mask.numel()
    if variant.packed:
        layout = prefix_sharing_layout(**inputs) if variant.shares else padding_free_layout(mask)
        tokens = layout.packed_tokens
    return {"tokens": tokens, "real": int(mask.sum()), "weight": step.weight(batch)}


def _needed_flops(step: Step, counted: list[list[int]]) -> float:
    total = 0.0
    for rows in counted:
        batch = step.batch(rows)
        scored = (batch["labels"][:, 1:] != -100).sum() if "labels" in batch else batch["completion_mask"].sum()
        total += step_flops(step, prefix_sharing_layout(**decoder_inputs(batch)), int(scored))
    return total


def _matmul_tflops(settings: BenchSettings) -> float:
    """What a large matrix product reaches here: the peak that is there to be had."""
    dtype, size = computed_dtype(settings.dtype), 8192 if settings.device == "cuda" else 2048
    a = torch.randn(size, size, device=settings.device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        if settings.device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def _speedup(variant: Variant, baseline: list[dict[str, float]], found: list[dict[str, float]]) -> float:
    if variant.batching == "fixed":
        return statistics.median(t["seconds"] / f["seconds"] for t, f in zip(baseline, found, strict=True))
    return sum(t["seconds"] for t in baseline) / sum(f["seconds"] for f in found)


def _peak_gib(
    step: Step, variant: Variant, plan: list[list[int]], found: list[dict[str, float]], settings: BenchSettings
) -> float | None:
    if not settings.memory:
        return None
    if settings.device == "cuda":
        return max(f["peak_gib"] for f in found)
    largest = max(range(len(found)), key=lambda i: found[i]["tokens"])
    with attached(step.models, variant):
        return step.peak_gib(_batch(step, variant, plan[largest]))


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
                raise RuntimeError(
                    f"{name} is not the same computation: in {where} its {quantity} is {ours:.6g} and TRL's "
                    f"{theirs:.6g}, {difference:.1e} apart (at most {tolerance:.0e})."
                )
