"""
Times a training step of TRL, padded and packed, side by side: DPO, SFT, or GRPO on completions that exist already.

All variants have the same TRL trainer, policy, reference and rows. They differ in the patches on the models and, for
some, in the rows of a batch. Steps are interleaved batch by batch, so that a change of the machine's speed affects all
variants. Losses and gradients of the variants must agree, or the run fails.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from ...core.call.layout_of import LayoutInputs, PrefixSharing
from ...core.layout.build import prefix_sharing_layout
from ...core.layout.shared_prefixes import PrefixPlan
from ...core.version import __version__
from ...versions import installed_versions
from .batches import Batches, divide_rows, in_parts
from .memory import MemoryCount, free_bytes
from .peak import Peak
from .settings import TOLERANCE, VARIANTS, BenchSettings, Measurement, Variant, VariantResult, WrongNumbersError
from .steps import BenchStep, attached, decoder_inputs, step_flops


__all__ = ["describe", "measure", "profile"]

Watch = Callable[[str, int, int], None]
"""Called before each step with what is measured, the number of steps done, and the number of all steps."""

Figures = dict[str, float]
"""Figures of one step: its time, loss, gradient, tokens and weight."""


def measure(step: BenchStep, deadline: float | None = None, watch: Watch = lambda *_: None) -> Measurement:
    """
    Measure all variants of the settings, TRL's padded step first. Those that do not fit into memory are left out.

    Args:
        step ([`BenchStep`]):
            Step of [`~trl_padfix.tools.bench.building.prepare`].
        deadline (`float`, *optional*):
            Value of `time.monotonic()` after which no batch is begun.
        watch (`Callable`, *optional*):
            Shows the progress.

    Returns:
        [`Measurement`]: Figures of the variants; after a deadline or Ctrl-C of those with TRL's batches only.

    Raises:
        WrongNumbersError: If losses or gradients of the variants differ.
        TimeoutError, KeyboardInterrupt: If no counted batch was done before the deadline, or before Ctrl-C.
    """
    settings = step.settings
    fixed = in_parts(range(len(step.rows)), settings.batch_rows)
    warmup, counted = fixed[: settings.warmup], fixed[settings.warmup :]
    plans = {name: warmup + divide_rows(step, VARIANTS[name], counted) for name in settings.variants}
    left_out = _too_large(step, plans)
    plans = {name: batches for name, batches in plans.items() if name not in left_out}
    variants = [VARIANTS[name] for name in plans]
    # Norms, softmax and loss are computed in float32 in every precision.
    dtypes = sorted({torch.float32, settings.computed_dtype}, key=str)
    peak = Peak(settings.device, dtypes, settings.peak_tflops)
    peak.measure(times=2)
    # On CUDA the timed steps report their memory; on CPU each variant has one more step, under the profiler.
    memory_steps = len(variants) if settings.memory and settings.device == "cpu" else 0
    total = sum(map(len, plans.values())) + memory_steps
    figures, rounds, interrupt = _time_steps(step, plans, peak, deadline, lambda *a: watch(*a, total))
    if rounds < max(map(len, plans.values())):
        # Other batches divide the rows differently, so an incomplete run of them has other rows than TRL's.
        counted = counted[: max(0, rounds - settings.warmup)]
        variants = [v for v in variants if v.has_trls_batches]
        figures = {v.name: figures[v.name][: len(counted)] for v in variants}
    if not counted:
        raise interrupt or TimeoutError("No counted step was done in the time that there was.")
    _check_equal(figures, TOLERANCE[settings.computed_dtype])
    fixed_flops = _needed_flops(step, counted)
    # Other batches share more tokens, or fewer, so the least arithmetic for them differs.
    flops = {v.name: _needed_flops(step, plans[v.name][settings.warmup :]) for v in variants if not v.has_trls_batches}
    padded = sum(decoder_inputs(step.collate(rows))["input_ids"].numel() for rows in counted)  # of TRL's batches
    results = [_result(v, figures, padded, peak, flops.get(v.name, fixed_flops), settings) for v in variants]
    done = sum(min(rounds, len(batches)) for batches in plans.values())
    try:
        for variant, result in zip(variants, results, strict=True) if memory_steps and not interrupt else ():
            watch(f"memory of {variant.name}", done, total)
            largest = max(range(result.steps), key=lambda i: figures[variant.name][i]["tokens"])
            rows = plans[variant.name][settings.warmup + largest]
            with attached(step, variant):
                result.peak_gib, result.kept_mib = step.peak_gib(rows, variant), step.kept_mib(rows, variant)
            done += 1
    except KeyboardInterrupt as error:
        interrupt = error
    watch("done", done, total)
    return Measurement(results, left_out, interrupt, peak.impossible_figure(results))


def _too_large(step: BenchStep, plans: dict[str, Batches]) -> dict[str, str]:
    """
    The variants whose largest step does not fit into memory, with the reason.

    Raises:
        ValueError: If none fits.
    """
    free, count = free_bytes(step.settings.device), MemoryCount(step)
    reasons: dict[str, str] = {}
    for name, batches in plans.items():
        variant = VARIANTS[name]
        if variant.has_budget:  # `--max-tokens-per-batch` bounds it
            continue
        tokens, shape = 0, (0, 0)
        for rows in batches:
            tokens = max(tokens, int(_counts(step, variant, rows)["tokens"]))
            if not (variant.packed or variant.flat):
                ids = decoder_inputs(step.collate(rows, variant))["input_ids"]
                shape = max(shape, tuple(ids.shape), key=lambda s: s[0] * s[1] ** 2)
        try:
            needed = count.needed(tokens, shape, free)
        except NotImplementedError:
            return {}  # layers without attention: what their kernels keep cannot be counted
        if needed > free:
            reasons[name] = (
                f"its largest step computes {tokens:,} tokens and needs about {needed / 2**30:.1f} GiB beside the "
                f"models, and {free / 2**30:.1f} are free"
            )
    if len(reasons) == len(plans):
        name, reason = [*reasons.items()][-1]
        raise ValueError(
            f"No variant fits into memory: of {name} {reason}. Fewer `--pairs`, a smaller `--shape` or "
            "`--max-length`, or `--gradient-checkpointing` need less."
        )
    return reasons


def _time_steps(
    step: BenchStep, plans: dict[str, Batches], peak: Peak, deadline: float | None, watch: Callable[[str, int], None]
) -> tuple[dict[str, list[Figures]], int, KeyboardInterrupt | None]:  # fmt: skip
    """
    Run the planned batches of each variant, interleaved batch by batch, until the deadline or Ctrl-C.

    Returns:
        `tuple`: Figures of the counted steps of each variant, complete rounds, and the interrupt, if there was one.
    """
    variants = [VARIANTS[name] for name in plans]
    figures: dict[str, list[Figures]] = {name: [] for name in plans}
    rounds = done = 0
    try:
        while rounds < max(map(len, plans.values())) and (deadline is None or time.monotonic() <= deadline):
            # Rotated, so that each variant runs in each place equally often: after another one caches are warm.
            shift = rounds % len(variants)
            for variant in variants[shift:] + variants[:shift]:
                if rounds >= len(plans[variant.name]):  # other batches can be fewer than the fixed ones
                    continue
                watch(variant.name, done)
                rows = plans[variant.name][rounds]
                with attached(step, variant):
                    step_figures = step.run(rows, variant)
                    if rounds >= step.settings.warmup:
                        figures[variant.name].append(step_figures | _counts(step, variant, rows))
                done += 1
            peak.measure()
            rounds += 1
    except KeyboardInterrupt as error:
        return figures, rounds, error
    return figures, rounds, None


def _result(
    variant: Variant, figures: dict[str, list[Figures]], padded_tokens: int, peak: Peak, flops: float,
    settings: BenchSettings,
) -> VariantResult:  # fmt: skip
    """Summarize the steps of a variant beside TRL's. On CPU memory is added later."""
    steps, baseline = figures[variant.name], figures.get("trl")
    seconds = [f["seconds"] for f in steps]
    tokens = int(sum(f["tokens"] for f in steps))
    has_peak = settings.memory and settings.device == "cuda"
    return VariantResult(
        name=variant.name,
        seconds=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        speedup=_speedup(variant, baseline, steps),
        steps=len(steps),
        tokens=tokens,
        tokens_per_second=sum(f["real"] for f in steps) / sum(seconds),
        token_limit=padded_tokens / tokens,
        mfu=peak.share(flops, sum(seconds)),
        loss=_weighted(steps, "loss"),
        grad_norm=statistics.mean(f["grad_norm"] for f in steps),
        step_seconds=[round(s, 6) for s in seconds],
        peak_gib=max(f["peak_gib"] for f in steps) if has_peak else None,
    )


def profile(step: BenchStep) -> dict[str, str]:
    """Table of the longest operations of a step, for each variant on the first fixed batch."""
    tables = {}
    for variant in (VARIANTS[name] for name in step.settings.variants):
        with attached(step, variant):
            tables[variant.name] = step.profile(list(range(step.settings.batch_rows)), variant)
    return tables


def describe(settings: BenchSettings, data: str) -> dict[str, Any]:
    """Settings, machine and versions: without them a figure cannot be compared with others."""
    device = torch.cuda.get_device_name() if settings.device == "cuda" else platform.processor() or platform.machine()
    return {
        "data": data,
        "settings": asdict(settings),
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": {"trl_padfix": __version__} | installed_versions(["torch", "transformers", "trl"]),
    }


def _counts(step: BenchStep, variant: Variant, rows: list[int]) -> Figures:
    """Tokens that the decoder computes for a batch, its real tokens, and its weight in the loss."""
    batch = step.collate(rows, variant)
    if variant.flat:
        tokens = real = batch["input_ids"].numel()
    else:
        mask = decoder_inputs(batch)["attention_mask"]
        tokens, real = mask.numel(), int(mask.sum())
        if variant.has_budget:
            collated = step.micro_batches(rows)
            plan, batches = collated.prefix_plan, [m.batch for m in collated.micro_batches]
            tokens = _planned_tokens(plan) if plan else sum(map(_packed_tokens, batches))
        elif variant.packed:
            tokens = _packed_tokens(batch, variant.shares)
    return {"tokens": tokens, "real": real, "weight": step.weight(batch)}


def _packed_tokens(batch: dict[str, torch.Tensor], shares: PrefixSharing = True) -> int:
    return LayoutInputs(*decoder_inputs(batch).values(), shares=bool(shares)).build().packed_tokens


def _planned_tokens(plan: PrefixPlan) -> int:
    """Tokens that the forwards of a step compute: a recomputed prefix twice."""
    prefixes = (layout for prefix in plan.prefixes.values() for layout in prefix.layouts.values())
    return sum(layout.computed_tokens for layout in [*plan.layouts.values(), *prefixes])


def _needed_flops(step: BenchStep, batches: Batches) -> float:
    """Least floating-point operations for batches: each distinct token is computed once."""
    total = 0.0
    for rows in batches:
        batch = step.collate(rows)
        scored = (batch["labels"][:, 1:] != -100).sum() if "labels" in batch else batch["completion_mask"].sum()
        total += step_flops(step, prefix_sharing_layout(**decoder_inputs(batch)), int(scored))
    return total


def _speedup(variant: Variant, baseline: list[Figures] | None, steps: list[Figures]) -> float | None:
    if baseline is None:
        return None
    if variant.has_trls_batches:
        # Per batch: batches differ in length, and interleaved steps share the state of the machine.
        return statistics.median(t["seconds"] / s["seconds"] for t, s in zip(baseline, steps, strict=True))
    return sum(t["seconds"] for t in baseline) / sum(s["seconds"] for s in steps)


def _weighted(steps: list[Figures], quantity: str) -> float:
    return sum(s["weight"] * s[quantity] for s in steps) / sum(s["weight"] for s in steps)


def _check_equal(figures: dict[str, list[Figures]], tolerance: float) -> None:
    """Raise a [`WrongNumbersError`] if a variant's loss or gradient differs from TRL's, or the first one's."""
    first = next((name for name in figures if VARIANTS[name].has_trls_batches), next(iter(figures)))
    baseline, whose = figures[first], "TRL" if first == "trl" else first
    for name, steps in figures.items():
        values = []
        if VARIANTS[name].has_trls_batches:
            for i, (ours, theirs) in enumerate(zip(steps, baseline, strict=True)):
                values += [(f"step {i}", q, ours[q], theirs[q]) for q in ("loss", "grad_norm")]
        for quantity in ("loss", "grad_projection"):
            values.append(("all rows", quantity, _weighted(steps, quantity), _weighted(baseline, quantity)))
        for where, quantity, ours, theirs in values:
            # A projection can be near 0 for a large gradient, so its difference is relative to the norm.
            scale = baseline[0]["grad_norm"] if quantity == "grad_projection" else abs(theirs)
            difference = abs(ours - theirs) / scale
            if not difference <= tolerance:  # not `>`: NaN must fail
                raise WrongNumbersError(
                    f"{name} is not the same computation: in {where} its {quantity} is {ours:.6g} and {whose}'s "
                    f"{theirs:.6g}, {difference:.1e} apart (at most {tolerance:.0e})."
                )
