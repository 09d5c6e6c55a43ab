"""What a benchmark measures: its variants, its settings, and the figures of one variant."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...core.call.layout_of import PrefixSharing
from ...trainers.batching.measures import PairMeasure, RowMeasure, TextMeasure


__all__ = [
    "TOLERANCE",
    "TRAINERS",
    "VARIANTS",
    "BenchSettings",
    "ImpossibleFigureError",
    "Interrupted",
    "Variant",
    "VariantResult",
    "WrongNumbersError",
]


class WrongNumbersError(RuntimeError):
    """Two ways to compute the same rows give different numbers: there is nothing to time."""


class ImpossibleFigureError(RuntimeError):
    """A step seems to do more arithmetic than the device can. `results` are what was measured nevertheless."""

    def __init__(self, message: str, results: list[VariantResult]):
        super().__init__(message)
        self.results = results


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after some counted steps: their `results`, of the variants with the same batches as TRL."""

    def __init__(self, results: list[VariantResult]):
        super().__init__()
        self.results = results


TRAINERS = ("dpo", "sft", "grpo")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative difference of loss and gradient between variants."""


@dataclass(frozen=True)
class Variant:
    """A way to compute the same rows."""

    name: str
    ours: bool = True  # this package's, or TRL's
    packed: bool = True  # padding is removed
    shares: PrefixSharing = False
    # "grouped": rows of like length together; "prefix": rows that begin alike together; "budget": by distinct tokens;
    # "packed": TRL's packing, as many tokens as the fixed batches have.
    batching: str = "fixed"
    compiled: bool = False  # the decoder layers, one by one
    flat: bool = False  # TRL's collator lays rows behind one another: its own `padding_free`


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
        Variant("token_budget", shares=True, batching="budget"),
        Variant("padding_free_compiled", compiled=True),
        Variant("prefix_sharing_compiled", shares=True, compiled=True),
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
    def batch_rows(self) -> int:
        """Prepared rows of a batch; GRPO's batches are prepared whole."""
        return 1 if self.trainer == "grpo" else self.pairs

    @property
    def measure(self) -> type[RowMeasure]:
        """What the rows of the trainer are measured by."""
        return TextMeasure if self.trainer == "sft" else PairMeasure

    def __post_init__(self) -> None:
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or self.variants[:1] != ("trl",):
            raise ValueError(
                f"`variants` are names among {', '.join(VARIANTS)}, TRL's own first, got {', '.join(self.variants)}."
            )
        if self.trainer == "grpo" and any(VARIANTS[name].batching != "fixed" for name in self.variants):
            raise ValueError("GRPO's batches are prompts with all their completions: they are not grouped otherwise.")
        if self.logprob_passes and self.trainer != "grpo":
            raise ValueError(f"`logprob_passes` are GRPO's, and the trainer is {self.trainer}: leave it out.")
        if self.trainer != "sft" and any(VARIANTS[name].flat for name in self.variants):
            raise ValueError(
                f"TRL's own `padding_free` and packing are SFT's, and the trainer is {self.trainer}: leave "
                "`trl_padding_free` and `trl_packing` out."
            )


@dataclass
class VariantResult:
    """One variant over all counted rows."""

    name: str
    seconds: float  # the median step; then the quickest and the slowest
    low: float
    high: float
    speedup: float  # median of TRL's step time over this one's; if batched otherwise, of the time for all rows
    steps: int
    tokens: int  # that entered the decoder per forward, over all rows
    tokens_per_second: float  # real tokens of all rows over the time of all steps
    token_limit: float  # tokens of TRL's padded batches over `tokens`: the speed-up if time went with them alone
    mfu: float  # arithmetic that the distinct tokens need at the least (`step_flops`), over time and peak
    loss: float  # mean over rows, for SFT over labelled tokens
    grad_norm: float  # mean over steps
    step_seconds: list[float] = field(repr=False)
    peak_gib: float | None = None  # of the largest step
    kept_mib: float | None = None  # what the graph of the largest step keeps for the backward
