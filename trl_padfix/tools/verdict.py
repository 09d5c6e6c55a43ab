"""
Which settings pay on a dataset, and why: the end of `trl-padfix stats`.

Tokens are counted in random batches, in batches of rows with long shared prefixes, and in batches by TRL's settings.
Their ratio limits the speed-up where time is proportional to tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from .stats import Lengths, batch_tokens


__all__ = ["UNITS", "Verdict", "advise"]

WORTH_GROUPING = 0.9
"""Grouping is advised if grouped batches have less than this share of the tokens of random ones."""

WORTH_SHARING = 0.99
"""Sharing is advised if batches have less than this share of their real tokens with it."""

UNITS = {"dpo": "pairs", "sft": "rows", "kto": "rows"}
"""Units in which the batches of a trainer are counted."""


@dataclass(frozen=True)
class Verdict:
    """Mean numbers of tokens of a batch, and the settings that follow from them."""

    batch_size: int
    trainer: str
    padded: float  # what TRL computes
    bucket_by_length: float  # the same, with rows of about one length together
    real: float  # what TRL computes with its own `padding_free` or packing (SFT only)
    auto: float  # with padding removed and `prefix_sharing="auto"`
    grouped: float  # the same, with rows of long shared prefixes together

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

    def lines(self) -> list[str]:
        """The verdict in words."""
        saved, saved_by_grouping = 1 - self.auto / self.real, 1 - self.grouped / self.auto
        settings = ["padding_free=True", 'prefix_sharing="auto"' if self.shares else "prefix_sharing=False"]
        settings += ["group_by_prefix=True"] * self.groups
        grouping = f"grouped ones save {saved_by_grouping:.0%} more"
        if not self.groups:
            grouping = f"grouping would save {max(saved_by_grouping, 0):.0%}"
        packed = f"{self.padded / self.real:.1f}x by tokens" if self.trainer == "sft" else "none for this trainer"
        return [
            f"Use {', '.join(settings)}.",
            f"Padding is {1 - self.real / self.padded:.0%} of TRL's batches of {self.batch_size} "
            f"{UNITS[self.trainer]}; random batches repeat {saved:.0%} of the rest in prefixes, and {grouping}.",
            f"Limit by tokens: {self.by_tokens:.1f}x ({self.padded:,.0f} tokens in TRL's padded batch, "
            f"{self.tokens:,.0f} with these settings).",
            f"TRL's group_by_length: {self.padded / self.bucket_by_length:.1f}x by tokens; its padding_free or "
            f"packing: {packed}.",
        ]


def advise(lengths: Lengths, *, trainer: str, batch_size: int) -> Verdict:
    """
    Count the tokens of batches under every setting.

    Args:
        lengths ([`Lengths`]):
            Tokens of the rows that TRL trains on, see [`Lengths.truncated`].
        trainer (`str`):
            `"dpo"`, `"sft"` and so on.
        batch_size (`int`):
            Rows of a batch; with fewer rows, one batch of all rows is counted.

    Returns:
        [`Verdict`]
    """
    size = min(batch_size, len(lengths))
    random, grouped, by_length = (batch_tokens(lengths, size, order=order) for order in ("random", "prefix", "length"))
    return Verdict(
        batch_size=size,
        trainer=trainer,
        padded=random.padded,
        bucket_by_length=by_length.padded,
        real=random.real,
        auto=random.auto,
        grouped=grouped.auto,
    )
