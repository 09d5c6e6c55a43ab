"""
Which settings pay on a dataset, and why: the end of `trl-padfix stats`.

Tokens are counted in batches of a sample: random batches, batches of rows with long shared prefixes, and batches of
TRL's own settings. Their ratio limits the speed-up where time goes with tokens; `trl-padfix bench` measures the speed.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.layout.layout import GATHERED_KEYS_PER_TOKEN
from ..trainers.batching.measures import PairMeasure, TextMeasure, UnpairedMeasure
from ..trainers.batching.prefix_groups import group_rows, sort_by_prefix
from .data import checked_rows
from .stats import SAMPLE, SIDES, TokenRow, sequences_of, token_rows


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

__all__ = ["UNITS", "PrefixTree", "Verdict", "advise", "bench_data", "prefix_tree", "sample", "truncate"]

BATCHES = 24
"""Batches that counts are averaged over."""

WORTH_GROUPING = 0.9
"""Grouping is advised if grouped batches have less than this share of the tokens of random ones."""

WORTH_SHARING = 0.99
"""Sharing is advised if batches have less than this share of their real tokens with it."""

BENCH_TRAINERS = ("dpo", "sft", "grpo")
"""Trainers whose steps `trl-padfix bench` measures."""

LENGTH_BUCKETS = 50
"""Batches within which transformers' `group_by_length` sorts rows by their length (`LengthGroupedSampler`)."""


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
    rows: int  # of the sample
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

    def lines(self, data: str) -> list[str]:
        """The verdict in words, at most eight lines; `data` is the value of `bench --data`, see [`bench_data`]."""
        saved, saved_by_grouping = 1 - self.auto / self.real, 1 - self.grouped / self.auto
        padding = 1 - self.real / self.padded
        settings = ["padding_free=True", 'prefix_sharing="auto"' if self.shares else "prefix_sharing=False"]
        settings += ["group_by_prefix=True"] * self.groups
        unit, is_online, has_bench = UNITS[self.trainer], self.generations > 1, self.trainer in BENCH_TRAINERS
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
            f"{self.tokens:,.0f} with these settings){'; the speed is what `bench` measures' * has_bench}.",
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
        if has_bench:
            flags = " --group-by-prefix" if self.groups else f" --generations {self.generations}" * is_online
            lines.append(
                f"Measure it: trl-padfix bench --trainer {self.trainer} --data {data} --pairs {self.batch_size} "
                f"--variants trl,padding_free,auto{flags}"
            )
        return lines

    def to_dict(self, data: str) -> dict[str, Any]:
        """The verdict for JSON, with its derived figures and its lines about `data` (see [`bench_data`])."""
        derived = {name: getattr(self, name) for name in ("shares", "groups", "by_tokens")}
        return asdict(self) | derived | {"lines": self.lines(data)}


@dataclass(frozen=True)
class PrefixTree:
    """
    Sequences sorted by their tokens, which merges them where they begin alike.

    Attributes:
        lengths (`np.ndarray` of shape `(n,)`):
            Tokens of each sequence, in sorted order.
        shared (`np.ndarray` of shape `(n,)`):
            Tokens that each sequence has in common with the one before it. [1, 2, 3], [1, 2, 4] and [5] give 0, 2, 0.
    """

    lengths: np.ndarray
    shared: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> PrefixTree:
        order, shared = sort_by_prefix([np.asarray(ids) for ids in sequences])
        return cls(np.array([len(ids) for ids in sequences])[order], shared)

    @property
    def real(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    @property
    def auto(self) -> int:
        """Tokens that are computed with `prefix_sharing="auto"`."""
        saved = int(self.shared.sum())
        # The rule of `Layout.sharing_pays`. A sequence gathers the keys of all its tokens; one that shares all of them
        # has no query, and gathers none.
        gathered_keys = int(self.lengths[self.lengths > self.shared].sum())
        return self.real - saved if saved * GATHERED_KEYS_PER_TOKEN >= gathered_keys else self.real


def sample(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None, trainer: str = "",
    completions: np.ndarray | None = None,
) -> list[TokenRow]:  # fmt: skip
    """The first rows of a dataset, tokenized by [`token_rows`] and truncated by [`truncate`]."""
    rows = token_rows(list(checked_rows(dataset, 0, SAMPLE)), tokenizer, trainer)
    return truncate(rows, max_length, completions)


def truncate(
    rows: Sequence[TokenRow], max_length: int | None, completions: np.ndarray | None = None
) -> list[TokenRow]:
    """
    Tokenized rows of `"keep_start"`: truncated at their end, without those whose prompt alone fills `max_length`.

    Prompts of GRPO are not truncated; they get `completions` of random tokens, whose lengths are given as `(n, k)`.
    """
    draw, result = np.random.default_rng(0), []
    for i, row in enumerate(rows):
        if "input_ids" in row:
            result.append({"input_ids": row["input_ids"][:max_length]})
        elif completions is not None:
            result.append({**row, "completions": [draw.integers(2**31, size=n).tolist() for n in completions[i]]})
        elif max_length is None or len(row["prompt_ids"]) < max_length:  # TRL drops the others
            room = None if max_length is None else max_length - len(row["prompt_ids"])
            cut = {side: row[side][:room] for side in SIDES if side in row}
            result.append({"prompt_ids": row["prompt_ids"], **cut})
    return result


def advise(rows: Sequence[TokenRow], *, batch_size: int, budget: int, seed: int = 0, trainer: str = "") -> Verdict:
    """
    Count the tokens of batches of tokenized rows under every setting.

    Args:
        rows (`Sequence[TokenRow]`):
            Rows with the columns of [`token_rows`], such as a [`sample`].
        batch_size (`int`):
            Rows of a batch.
        budget (`int`):
            The `max_tokens_per_batch` that the verdict names.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random batches.
        trainer (`str`, *optional*):
            `"dpo"`, `"sft"` and so on; `"sft"` for texts and `"dpo"` for pairs by default.

    Returns:
        [`Verdict`]
    """
    draw, size = np.random.default_rng(seed), min(batch_size, len(rows))
    order = draw.permutation(len(rows))
    sequences = [sequences_of(row) for row in rows]
    lengths = np.array([[len(ids) for ids in row] for row in sequences])

    def draw_batches(order: np.ndarray) -> list[np.ndarray]:
        """Up to [`BATCHES`] random ones of the full batches of an order."""
        full = order[: len(order) // size * size].reshape(-1, size)
        return list(full[draw.permutation(len(full))[:BATCHES]])

    def padded_tokens(batches: list[np.ndarray]) -> float:
        return float(np.mean([lengths[batch].max() * lengths[batch].size for batch in batches]))

    def packed_tokens(batches: list[np.ndarray]) -> tuple[float, float]:
        """Mean tokens of a packed batch, without sharing and with `prefix_sharing="auto"`."""
        trees = [PrefixTree.of([ids for i in batch for ids in sequences[i]]) for batch in batches]
        return float(np.mean([tree.real for tree in trees])), float(np.mean([tree.auto for tree in trees]))

    random = draw_batches(order)
    real, auto = packed_tokens(random)
    _, grouped = packed_tokens(draw_batches(_order_by_prefix(rows, order, size)))
    by_length = draw_batches(_order_by_length(lengths.max(1), order, LENGTH_BUCKETS * size))
    return Verdict(
        batch_size=size,
        trainer=trainer or ("sft" if "input_ids" in rows[0] else "dpo"),
        padded=padded_tokens(random),
        bucket_by_length=padded_tokens(by_length),
        real=real,
        auto=auto,
        grouped=grouped,
        rows=len(rows),
        budget=budget,
        generations=len(rows[0].get("completions", [0])),
    )


def _order_by_prefix(rows: Sequence[TokenRow], order: np.ndarray, size: int) -> np.ndarray:
    """The order of `group_by_prefix`, in batches of `size` rows."""
    measures = {"input_ids": TextMeasure, "chosen_ids": PairMeasure, "completion_ids": UnpairedMeasure}
    measure = next((measure for column, measure in measures.items() if column in rows[0]), None)
    # Prompts of GRPO stay in order: their completions are generated batch by batch.
    return order if measure is None else group_rows(order, measure(sharing=True).examples(rows), size)


def _order_by_length(lengths: np.ndarray, order: np.ndarray, bucket: int) -> np.ndarray:
    """The order of transformers' `group_by_length`: the longest rows first within buckets of so many rows."""
    buckets = np.split(order, range(bucket, len(order), bucket))
    return np.concatenate([rows[np.argsort(-lengths[rows], kind="stable")] for rows in buckets])


def prefix_tree(rows: Sequence[TokenRow]) -> PrefixTree:
    """The sequences of a sample in sorted order; empty ones are left out."""
    return PrefixTree.of([ids for row in rows for ids in sequences_of(row) if len(ids)])


def bench_data(data: str, expand_turns: bool = False, **options: Any) -> str:
    """The value of `bench --data` for this data, with flags for all `options` that are not the defaults of `bench`."""
    defaults = {"shape": "small", "split": "train", "max_length": 1024}
    options = {name: value for name, value in options.items() if value not in (None, defaults.get(name))}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join([data, *flags]) + " --expand-turns" * expand_turns


UNITS = {"dpo": "pairs", "reward": "pairs", "sft": "rows", "kto": "rows", "grpo": "prompts", "rloo": "prompts"}
"""What the batches of a trainer are counted in."""
