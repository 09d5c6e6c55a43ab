"""
Which settings pay on a dataset, and why: the end of `trl-padfix stats`.

Token counts are those of a sample: of random batches, of batches of rows that begin alike, and of what TRL's own
settings would compute. The speed that they allow is estimated with four figures beside them: what scoring a token
over the vocabulary costs, what a pair of tokens costs in attention, under a mask and packed, and how much dearer a
token is in a larger batch. They were fitted to the measurements of `docs/bench` on CPU, and are within 21 percent of
all of them. On a GPU with TRL's fused LM head all are less, and the counts alone are the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..core.layout.layout import KEYS_PER_TOKEN
from ..trainers.batching.measures import PairMeasure, TextMeasure, UnpairedMeasure
from ..trainers.batching.prefix_groups import group_rows, sort_by_prefix
from .data import checked_rows
from .stats import SIDES, sequences_of, token_rows


__all__ = ["FITTED", "UNITS", "PrefixTree", "Verdict", "advise", "prefix_tree", "sample", "tokenized", "verdict_lines"]

FITTED = ("dpo", "sft")
"""Trainers whose measured steps the speed was fitted to."""

SAMPLE = 4096
"""Rows that are looked at, the first ones: rows that begin alike often stand together."""

BATCHES = 24
"""Batches that counts are averaged over."""

SCORING = 0.8
"""What scoring a token costs on CPU, in tokens of the decoder: fitted to the measured steps in docs/bench."""

MASKED, PACKED = 0.06, 0.03
"""What a pair of tokens costs in padded rows under a mask, and in others, in tokens of a decoder of hidden size 1."""

GROWTH = 0.05
"""A token on CPU takes as long as the tokens of its batch to this power: memory that is moved; fitted."""

WORTH_GROUPING = 0.9
"""Share of the tokens that grouped batches must fall below for grouping to be advised."""


@dataclass(frozen=True)
class Verdict:
    """Tokens of a batch on average, and what follows from them."""

    batch_size: int
    trainer: str
    padded: float  # what TRL computes
    bucket_by_length: float  # the same, with rows of like length together
    real: float  # what TRL computes with its own `padding_free` or packing (SFT only)
    auto: float  # with padding removed and `prefix_sharing="auto"`
    grouped: float  # the same, with rows that begin alike together
    scored: float  # trained on
    rows: int  # of the sample
    budget: int  # `max_tokens_per_batch` of the same memory as the largest batch
    squares: float  # pairs of tokens that padded rows compare under a mask; none where rows are equally long
    real_pairs: float  # those of each token and the ones before it, in `real`, `auto` and `grouped` batches
    auto_pairs: float
    grouped_pairs: float
    hidden_size: int  # of the model whose speed is estimated
    generations: int = 1  # completions of a row (GRPO)

    @property
    def shares(self) -> bool:
        return min(self.auto, self.tokens) < 0.99 * self.real

    @property
    def groups(self) -> bool:
        return self.grouped < WORTH_GROUPING * self.auto

    @property
    def advised(self) -> str:
        """The batches of the settings that are advised, `"auto"` or `"grouped"`."""
        return "grouped" if self.groups else "auto"

    @property
    def tokens(self) -> float:
        """With the settings that are advised."""
        return getattr(self, self.advised)

    @property
    def by_tokens(self) -> float:
        """The speed-up over TRL's padded step if time went with the tokens of the decoder alone."""
        return self.padded / self.tokens

    @property
    def speed(self) -> float | None:
        """The speed-up that `trl-padfix bench` is expected to measure on CPU; of steps that it was fitted to."""
        return self.speed_of(self.advised) if self.trainer in FITTED else None

    def speed_of(self, how: str) -> float:
        """The same of `"real"`, `"auto"` or `"grouped"` batches."""
        *_, (_, padded, ours) = self.terms(how)
        return padded / ours * (self.padded / getattr(self, how)) ** GROWTH

    def terms(self, how: str) -> list[tuple[str, float, float]]:
        """What a batch costs in tokens of the decoder: TRL's padded step, and one of such batches."""
        masked, packed = MASKED / self.hidden_size * self.squares, PACKED / self.hidden_size
        terms = [
            ("tokens of the decoder", self.padded, getattr(self, how)),
            (f"LM head: {SCORING} x tokens that are scored", SCORING * self.padded, SCORING * self.scored),
            (
                f"attention: {MASKED} (TRL, masked) or {PACKED} / {self.hidden_size} x pairs of tokens",
                masked or packed * self.real_pairs,
                packed * getattr(self, f"{how}_pairs"),
            ),
        ]
        return [*terms, ("together", sum(term[1] for term in terms), sum(term[2] for term in terms))]

    def table(self) -> list[tuple[str, str, str]]:
        """The speed line by line: terms, their sum, their ratio, and what makes it the speed."""
        terms = self.terms(self.advised)
        ratio, smaller = terms[-1][1] / terms[-1][2], self.by_tokens**GROWTH
        return [
            *((name, f"{of_trl:,.0f}", f"{of_ours:,.0f}") for name, of_trl, of_ours in terms),
            ("TRL's over ours", "", f"{ratio:.2f}"),
            (f"smaller batches: (tokens, TRL's over ours) to the power of {GROWTH}", "", f"{smaller:.2f}"),
            ("speed: the product of these two", "", f"{ratio * smaller:.1f}"),
        ]

    def to_dict(self, data: str) -> dict[str, Any]:
        """For JSON, with what follows from the counts, and the verdict on `data` in words."""
        derived = {name: getattr(self, name) for name in ("shares", "groups", "speed", "by_tokens")}
        terms = self.terms(self.advised)[:-1] if self.trainer in FITTED else []
        return asdict(self) | derived | {"terms": terms, "lines": verdict_lines(self, data)}


@dataclass(frozen=True)
class PrefixTree:
    """Rows sorted by their tokens: how many each has, and what it has in common with the row before it, `(n,)`."""

    lengths: np.ndarray
    common: np.ndarray


def sample(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None, trainer: str = "",
    completions: np.ndarray | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """
    The first rows of a dataset, tokenized as TRL does for a `trainer`, truncated at the end.

    They have the columns of [`token_rows`] and `scored`, how many tokens are trained on. Prompts of GRPO get
    `completions` of random tokens, as many as are given, `(n, k)`.
    """
    draw, kept = np.random.default_rng(0), []
    for i, row in enumerate(token_rows(list(checked_rows(dataset, 0, SAMPLE)), tokenizer, trainer)):
        if "input_ids" in row:
            ids = row["input_ids"][:max_length]
            kept.append({"input_ids": ids, "scored": max(0, len(ids) - row["prompt"])})
        elif completions is not None:
            made_up = [draw.integers(2**31, size=n).tolist() for n in completions[i]]
            kept.append({**row, "completions": made_up, "scored": sum(map(len, made_up))})
        elif max_length is None or len(row["prompt_ids"]) < max_length:  # TRL leaves the others out
            room = None if max_length is None else max_length - len(row["prompt_ids"])
            cut = {side: row[side][:room] for side in SIDES if side in row}
            kept.append({"prompt_ids": row["prompt_ids"], **cut, "scored": sum(map(len, cut.values()))})
    return kept


def tokenized(dataset: Any) -> list[dict[str, Any]]:
    """The same of rows that are tokenized already, pairs or texts with labels, as `trl-padfix bench` makes them."""

    def scored(row: dict[str, Any]) -> int:
        if "labels" in row:
            return sum(label != -100 for label in row["labels"])
        return len(row["chosen_ids"]) + len(row["rejected_ids"])

    return [{**row, "scored": scored(row)} for row in dataset]


def advise(
    rows: Sequence[dict[str, Any]], *, batch_size: int, budget: int, seed: int = 0, hidden_size: int = 512,
    trainer: str = "",
) -> Verdict:  # fmt: skip
    """Count what the batches of a [`sample`] cost in every way; `budget` is the `max_tokens_per_batch` to name."""
    draw, size = np.random.default_rng(seed), min(batch_size, len(rows))
    order = draw.permutation(len(rows))
    measures = {"input_ids": TextMeasure, "chosen_ids": PairMeasure, "completion_ids": UnpairedMeasure}
    measure = next((measure for column, measure in measures.items() if column in rows[0]), None)
    # Completions are generated for the prompts of a batch: there is no other order.
    grouped = order if measure is None else group_rows(order, measure(sharing=True).examples(rows), size)
    sequences = [sequences_of(row) for row in rows]
    lengths = np.array([[len(sequence) for sequence in row] for row in sequences])
    # As transformers does it: sorted by length within fifty batches.
    parts = np.split(order, range(50 * size, len(order), 50 * size))
    by_length = np.concatenate([part[np.argsort(-lengths[part].max(1), kind="stable")] for part in parts])

    def batches(of: np.ndarray) -> list[np.ndarray]:
        whole = of[: len(of) // size * size].reshape(-1, size)
        return list(whole[draw.permutation(len(whole))[:BATCHES]])

    def padded(of: list[np.ndarray]) -> float:
        return float(np.mean([lengths[batch].max() * lengths[batch].size for batch in of]))

    def square(batch: np.ndarray) -> float:
        tokens = lengths[batch]
        return 0.0 if (tokens == tokens[0, 0]).all() else float(tokens.max()) ** 2 * tokens.size

    def counts(of: list[np.ndarray]) -> list[float]:
        """Real tokens of a batch, those that are computed with `prefix_sharing="auto"`, and the pairs of both."""
        found = []
        for batch in of:
            order, common = sort_by_prefix([sequence for i in batch for sequence in sequences[i]])
            tokens = lengths[batch].ravel()[order]
            real, saved, keys = tokens.sum(), common.sum(), tokens[tokens > common].sum()
            pairs, repeated = ((n * (n + 1)).sum() / 2 for n in (tokens, common))
            shares = saved and saved * KEYS_PER_TOKEN >= keys
            found.append((real, real - saved * shares, pairs, pairs - repeated * shares))
        return np.mean(found, axis=0).tolist()

    random = batches(order)
    real, auto, real_pairs, auto_pairs = counts(random)
    _, in_groups, _, grouped_pairs = counts(batches(grouped))
    return Verdict(
        batch_size=size,
        trainer=trainer or ("sft" if "input_ids" in rows[0] else "dpo"),
        padded=padded(random),
        bucket_by_length=padded(batches(by_length)),
        real=real,
        auto=auto,
        grouped=in_groups,
        scored=float(np.mean([sum(rows[i]["scored"] for i in batch) for batch in random])),
        rows=len(rows),
        budget=budget,
        squares=float(np.mean([square(batch) for batch in random])),
        real_pairs=real_pairs,
        auto_pairs=auto_pairs,
        grouped_pairs=grouped_pairs,
        hidden_size=hidden_size,
        generations=len(rows[0].get("completions", [0])),
    )


def prefix_tree(rows: Sequence[dict[str, Any]]) -> PrefixTree:
    """The sequences of a sample in sorted order."""
    sequences = [s for row in rows for s in sequences_of(row) if len(s)]
    order, common = sort_by_prefix(sequences)
    return PrefixTree(np.array([len(s) for s in sequences])[order], common)


def verdict_lines(found: Verdict, data: str) -> list[str]:
    """The verdict in words: at most eight lines. `data` is what `bench` is to be given, with its flags."""
    saved, more = 1 - found.auto / found.real, 1 - found.grouped / found.auto
    pads = 1 - found.real / found.padded
    settings = ["padding_free=True", 'prefix_sharing="auto"' if found.shares else "prefix_sharing=False"]
    settings += ["group_by_prefix=True"] * found.groups
    unit, is_online = UNITS[found.trainer], found.generations > 1
    grouping = f"grouped ones save {more:.0%} more" if found.groups else f"grouping would save {max(more, 0):.0%}"
    each = f" x {found.generations} completions" if is_online else ""
    tokens = f"{found.by_tokens:.1f}x by the tokens of the decoder alone"
    on_cpu = (
        f"about {found.speed:.1f}x TRL's padded step as `bench` measures it on CPU, " if found.speed else "at most "
    )
    lines = [
        f"Use {', '.join(settings)}; {found.batch_size} {unit}{each} a batch, or max_tokens_per_batch={found.budget}.",
        f"Padding is {pads:.0%} of TRL's batches; random batches repeat {saved:.0%} of the rest in prefixes"
        + (f", and {grouping}." if not is_online else "."),
        f"Speed: {on_cpu}{tokens}" + (", as with a fused LM head." if found.speed else "."),
        f"Memory of activations: about {found.tokens / found.padded:.0%} of TRL's padded step, at equal batches.",
    ]
    if not is_online:
        lines.append(f"TRL's group_by_length: {found.padded / found.bucket_by_length:.1f}x by tokens.")
    if found.trainer == "sft":
        lines.append(
            f"TRL's padding_free (with FlashAttention) and packing: {found.padded / found.real:.1f}x by tokens, with "
            "no prefix shared."
        )
    else:
        lines.append(f"TRL's padding_free and packing: none for {found.trainer.upper()}.")
    if found.trainer in ("dpo", "sft", "grpo"):  # what `bench` has a step of
        more_flags = " --group-by-prefix" if found.groups else f" --generations {found.generations}" * is_online
        lines.append(
            f"Measure it: trl-padfix bench --trainer {found.trainer} --data {data} --pairs {found.batch_size} "
            f"--variants trl,padding_free,auto{more_flags}"
        )
    return lines


UNITS = {"dpo": "pairs", "reward": "pairs", "sft": "rows", "kto": "rows", "grpo": "prompts", "rloo": "prompts"}
"""What the batches of a trainer are counted in."""
