"""Variants, settings, figures and errors of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...core.call.layout_of import PrefixSharing
from ...trainers.batching.measures import PairMeasure, RowMeasure, TextMeasure


__all__ = [
    "TOLERANCE", "TRAINERS", "VARIANTS", "BenchSettings", "Measurement", "Variant", "VariantResult",
    "WrongNumbersError", "select_variants",
]  # fmt: skip


class WrongNumbersError(RuntimeError):
    """Variants give different losses or gradients for the same rows, or a step seems faster than its device can be."""


TRAINERS = ("dpo", "sft", "grpo")
"""Trainers whose steps are measured."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient between variants. bfloat16 has 8 bits: steps of 4e-3."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the rows of a benchmark."""

    name: str
    ours: bool = True  # of this package; else of TRL
    packed: bool = True  # whether padding is removed by this package
    shares: PrefixSharing = False
    # "fixed": the same batches as TRL; "grouped": rows of similar length; "prefix": rows with a common prefix;
    # "packed": TRL's packing, as many tokens as fixed batches.
    batching: str = "fixed"
    has_budget: bool = False  # a step in micro-batches, as `max_tokens_per_batch` trains it
    compiled: bool = False  # each decoder layer is compiled
    flat: bool = False  # TRL's own `padding_free`: its collator concatenates the rows

    @property
    def pads_left(self) -> bool:
        """Whether its batches are padded on the left: padded on the right, this package does what TRL does."""
        return self.ours and not self.packed

    @property
    def has_trls_batches(self) -> bool:
        """Whether each step has the rows of a step of TRL."""
        return self.batching == "fixed"


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("trl", ours=False, packed=False),
        Variant("trl_grouped", ours=False, packed=False, batching="grouped"),
        Variant("trl_padding_free", ours=False, packed=False, flat=True),
        Variant("trl_packing", ours=False, packed=False, flat=True, batching="packed"),
        Variant("padded", packed=False),
        Variant("padding_free"),
        Variant("prefix_sharing", shares=True),
        Variant("auto", shares="auto"),
        Variant("group_by_prefix", shares=True, batching="prefix"),
        Variant("token_budget", shares=True, has_budget=True),
        Variant("padding_free_compiled", compiled=True),
        Variant("prefix_sharing_compiled", shares=True, compiled=True),
    )
}


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a benchmark. Each field is an option of `trl-padfix bench`, except `shuffle`."""

    trainer: str = "dpo"
    variants: tuple[str, ...] = ("trl", "padding_free", "prefix_sharing")
    pairs: int = 8
    generations: int = 8
    prompt_length: int = 512
    completion_length: int = 64
    logprob_passes: bool = False
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
    liger: bool = False
    compile_backend: str = "inductor"
    shuffle: bool = True
    expand_turns: bool = False
    tokenizer: str | None = None

    @property
    def weights_dtype(self) -> torch.dtype:
        """Precision of the weights. `"autocast"`, TRL's default, has weights in float32 under bfloat16 autocast."""
        return torch.float32 if self.dtype == "autocast" else getattr(torch, self.dtype)

    @property
    def computed_dtype(self) -> torch.dtype:
        """Precision of the matrix products."""
        return torch.bfloat16 if self.dtype == "autocast" else getattr(torch, self.dtype)

    @property
    def batch_rows(self) -> int:
        """Prepared rows per batch: `pairs`, and 1 for GRPO, whose batches are prepared as one row each."""
        return 1 if self.trainer == "grpo" else self.pairs

    @property
    def measure(self) -> type[RowMeasure]:
        """Class that counts the tokens of the rows."""
        return TextMeasure if self.trainer == "sft" else PairMeasure

    @property
    def batch_size(self) -> str:
        """Size of a batch in words."""
        completions = f"{self.pairs} x {self.generations} completions"
        return {"dpo": f"{self.pairs} pairs", "sft": f"{self.pairs} rows", "grpo": completions}[self.trainer]

    def title(self, device: str) -> str:
        """Title of a table or a picture of the figures; `device` is the name of the device."""
        step = f"{self.trainer.upper()} step{' without generation' if self.trainer == 'grpo' else ''}"
        family = "Qwen3.5" if self.shape.startswith("hybrid") else "Qwen2"
        return f"{step}, {self.batch_size}, {family} shape '{self.shape}', {self.dtype} on {device}, {self.attn}"

    def __post_init__(self) -> None:
        variants = [VARIANTS[name] for name in self.variants if name in VARIANTS]
        has_unknown = len(variants) < len(self.variants)
        if has_unknown or not variants or "trl" in self.variants[1:] or not variants[0].has_trls_batches:
            raise ValueError(
                f"`variants` are names among {', '.join(VARIANTS)}, got {', '.join(self.variants)}. TRL's own comes "
                "first; without it, one with TRL's batches, with which the others are compared."
            )
        if self.trainer == "grpo" and not all(variant.has_trls_batches for variant in variants):
            raise ValueError("GRPO's batches are prompts with all their completions: they cannot be regrouped.")
        if self.trainer == "grpo" and any(variant.has_budget for variant in variants):
            raise ValueError("A step of GRPO is measured in one forward: leave `token_budget` out.")
        if self.logprob_passes and self.trainer != "grpo":
            raise ValueError(f"`logprob_passes` are GRPO's, and the trainer is {self.trainer}: leave it out.")
        if self.trainer != "sft" and any(variant.flat for variant in variants):
            raise ValueError(
                f"TRL's own `padding_free` and packing are SFT's, and the trainer is {self.trainer}: leave "
                "`trl_padding_free` and `trl_packing` out."
            )


def select_variants(names: str, *, compiled: bool = False, group_by_prefix: bool = False) -> tuple[str, ...]:
    """Names of variants separated by commas, with those that `--compile` and `--group-by-prefix` add."""
    selected = names.split(",")
    if group_by_prefix and "group_by_prefix" not in selected:
        selected.append("group_by_prefix")
    packed = [name for name in selected if name in ("padding_free", "prefix_sharing")] if compiled else []
    return (*selected, *(f"{name}_compiled" for name in packed))


@dataclass
class VariantResult:
    """Figures of a variant over all counted rows."""

    name: str
    seconds: float  # median step
    low: float  # fastest step
    high: float  # slowest step
    # Median per-batch speed-up over TRL; with other batches than TRL, ratio of the total times; `None` without TRL.
    speedup: float | None
    steps: int
    tokens: int  # computed by the decoder in one forward of each batch
    tokens_per_second: float  # real tokens of all rows / seconds of all steps
    token_limit: float  # TRL's padded tokens / `tokens`: the speed-up if time were proportional to tokens
    mfu: float  # `step_flops` / seconds / peak
    loss: float  # mean over rows, for SFT over labelled tokens
    grad_norm: float  # mean over steps
    step_seconds: list[float] = field(repr=False)
    peak_gib: float | None = None  # peak memory of the largest step
    kept_mib: float | None = None  # saved by the graph of the largest step for its backward


@dataclass
class Measurement:
    """Figures of all variants, TRL's first, and what stands against them."""

    results: list[VariantResult]
    left_out: dict[str, str]  # variants that do not fit into memory, with the reason
    interrupt: KeyboardInterrupt | None = None  # of Ctrl-C: then they are of variants with TRL's batches only
    impossible: str | None = None  # message about a step that seems faster than the device can be

    def checked(self) -> list[VariantResult]:
        """The figures; raises a [`WrongNumbersError`] or the interrupt if something stands against them."""
        if self.impossible is not None:
            raise WrongNumbersError(self.impossible)
        if self.interrupt is not None:
            raise self.interrupt
        return self.results
