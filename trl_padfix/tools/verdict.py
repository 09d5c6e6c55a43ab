"""
Which settings pay on a dataset, and why: the end of `trl-padfix stats`.

Tokens are counted in random batches, in batches of rows with long shared prefixes, and in those of TRL's settings.
Their ratio limits the speed-up where time goes with tokens; `benchmarks/bench.py` measures the speed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .formats import ONLINE
from .stats import Lengths, batch_tokens


__all__ = ["UNITS", "Verdict", "advise"]

WORTH_GROUPING = 0.9
"""Grouping is advised if grouped batches have less than this share of the tokens of random ones."""

WORTH_SHARING = 0.99
"""Sharing is advised if batches have less than this share of their real tokens with it."""

UNITS = {"dpo": "pairs", "reward": "pairs", "sft": "rows", "kto": "rows", "grpo": "prompts", "rloo": "prompts"}
"""What the batches of a trainer are counted in."""


@dataclass(frozen=True)
class Verdict:
    """Mean numbers of tokens of a batch, and the settings that they advise."""

    batch_size: int
    trainer: str
    padded: float  # what TRL computes
    bucket_by_length: float  # the same, with rows of about one length together
    real: float  # what TRL computes with its own `padding_free` or packing (SFT only)
    auto: float  # with padding removed and `prefix_sharing="auto"`
    grouped: float  # the same, with rows of long shared prefixes together
    rows: int  # that TRL trains on
    budget: int  # `max_tokens_per_batch` of the same memory as the largest batch
    generations: int = 1  # completions of a row (GRPO)

    @property
    def shares(self) -> bool:
        """Whether `prefix_sharing` is advised."""
        return min(self.auto, self.tokens) < WORTH_SHARING * self.real

    @property
    def groups(self) -> bool:
        """Whether `group_by_prefix` is advised."""
        return self.grouped < WORTH_GROUPING * self.auto

    @property
    def tokens(self) -> float:
        """Tokens of a batch with the advised settings."""
        return self.grouped if self.groups else self.auto

    @property
    def by_tokens(self) -> float:
        """Tokens of TRL's padded batch over tokens of a batch with the advised settings."""
        return self.padded / self.tokens

    def lines(self, data: str | None = None) -> list[str]:
        """The verdict in words, at most eight lines; `data` is the value of `--data` of `benchmarks/bench.py`."""
        saved, saved_by_grouping = 1 - self.auto / self.real, 1 - self.grouped / self.auto
        padding = 1 - self.real / self.padded
        settings = ["padding_free=True", 'prefix_sharing="auto"' if self.shares else "prefix_sharing=False"]
        settings += ["group_by_prefix=True"] * self.groups
        unit, is_online = UNITS[self.trainer], self.generations > 1
        completions = f" x {self.generations} completions" if is_online else ""
        if is_online:
            grouping = ""
        elif self.groups:
            grouping = f", and grouped ones save {saved_by_grouping:.0%} more"
        else:
            grouping = f", and grouping would save {max(saved_by_grouping, 0):.0%}"
        lines = [
            f"Use {', '.join(settings)}; {self.batch_size} {unit}{completions} a batch, or "
            f"max_tokens_per_batch={self.budget}.",
            f"Padding is {padding:.0%} of TRL's batches; random batches repeat {saved:.0%} of the rest in prefixes"
            f"{grouping}.",
            f"Limit by tokens: {self.by_tokens:.1f}x ({self.padded:,.0f} tokens in TRL's padded batch, "
            f"{self.tokens:,.0f} with these settings).",
            f"Memory of activations: about {self.tokens / self.padded:.0%} of TRL's padded step, at equal batches.",
        ]
        if not is_online:
            lines.append(f"TRL's group_by_length: {self.padded / self.bucket_by_length:.1f}x by tokens.")
        if self.trainer == "sft":
            lines.append(
                "TRL's padding_free (with FlashAttention) and packing: "
                f"{self.padded / self.real:.1f}x by tokens, with no prefix shared."
            )
        else:
            lines.append(f"TRL's padding_free and packing: none for {self.trainer.upper()}.")
        if data is not None and self.trainer in ("dpo", "sft"):
            lines.append(
                f"Measure it in a clone: python benchmarks/bench.py --trainer {self.trainer} --data {data} --pairs "
                f"{self.batch_size} --variants trl,padding_free,auto{' --group-by-prefix' * self.groups}"
            )
        return lines

    def to_dict(self, data: str | None) -> dict[str, Any]:
        """The verdict for JSON, with its derived figures and its lines."""
        derived = {name: getattr(self, name) for name in ("shares", "groups", "by_tokens")}
        return asdict(self) | derived | {"lines": self.lines(data)}


def advise(lengths: Lengths, *, trainer: str, batch_size: int, budget: int | None = None, seed: int = 0) -> Verdict:
    """
    Count the tokens of batches under every setting.

    Args:
        lengths ([`Lengths`]):
            Tokens of the rows that TRL trains on, see [`Lengths.truncated`].
        trainer (`str`):
            `"dpo"`, `"sft"` and so on.
        batch_size (`int`):
            Rows of a batch; of fewer rows, one batch of all of them is counted.
        budget (`int`, *optional*):
            The `max_tokens_per_batch` that the verdict names; by default the tokens of a batch.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random batches.

    Returns:
        [`Verdict`]
    """
    size = min(batch_size, len(lengths))
    random, grouped, by_length = (
        batch_tokens(lengths, size, order=order, seed=seed) for order in ("random", "prefix", "length")
    )
    is_online = trainer in ONLINE  # prompts stay in order: their completions are generated batch by batch
    verdict = Verdict(
        batch_size=size,
        trainer=trainer,
        padded=random.padded,
        bucket_by_length=by_length.padded,
        real=random.real,
        auto=random.auto,
        grouped=random.auto if is_online else grouped.auto,
        rows=len(lengths),
        budget=budget or 0,
        generations=lengths.sequences.shape[1] if is_online else 1,
    )
    return verdict if budget else replace(verdict, budget=round(verdict.tokens))
