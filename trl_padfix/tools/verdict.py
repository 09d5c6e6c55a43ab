"""
Which settings pay on a dataset, and why: the end of `trl-padfix stats`.

Token counts are those of a sample: of random batches, of batches of rows that begin alike, and of what TRL's own
settings would compute. The speed that they allow is estimated with three figures beside them: what scoring a token
over the vocabulary costs, what attention under a mask costs padded rows, and how much dearer a token is in a larger
batch. They were fitted to the measurements of `docs/bench` on CPU, and are within 16 percent of all of them. On a GPU
with TRL's fused LM head all are less, and the counts alone are the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..core.layout.layout import KEYS_PER_TOKEN
from ..trainers.steps.grouping import group_rows, prefix_order
from ..trainers.steps.measures import PairMeasure, TextMeasure
from .data import checked_rows
from .stats import token_rows


__all__ = ["PrefixTree", "Verdict", "advise", "prefix_tree", "sample", "tokenized", "verdict_lines"]

SAMPLE = 4096
"""Rows that are looked at, the first ones: rows that begin alike often stand together."""

BATCHES = 24
"""Batches that counts are averaged over."""

SCORING = 0.7
"""What scoring a token costs on CPU, in tokens of the decoder: fitted to the measured steps in docs/bench."""

MASKED = 0.04
"""What a pair of tokens in padded rows costs under a mask, in tokens of a decoder of hidden size 1; fitted."""

GROWTH = 0.07
"""A token on CPU takes as long as the tokens of its batch to this power: attention, memory that is moved; fitted."""

WORTH_GROUPING = 0.9
"""Share of the tokens that grouped batches must fall below for grouping to be advised."""


@dataclass(frozen=True)
class Verdict:
    """Tokens of a batch on average, and what follows from them."""

    batch_size: int
    trainer: str
    padded: float  # what TRL computes
    grouped_by_length: float  # the same, with rows of like length together
    real: float  # what TRL computes with its own `padding_free` or packing (SFT only)
    auto: float  # with padding removed and `prefix_sharing="auto"`
    grouped: float  # the same, with rows that begin alike together
    scored: float  # trained on
    rows: int  # of the sample
    budget: int  # `max_tokens_per_batch` of the same memory as the largest batch
    squares: float  # pairs of tokens that padded rows compare under a mask; none where rows are equally long
    hidden_size: int  # of the model whose speed is estimated

    @property
    def shares(self) -> bool:
        return min(self.auto, self.grouped if self.groups else self.auto) < 0.99 * self.real

    @property
    def groups(self) -> bool:
        return self.grouped < WORTH_GROUPING * self.auto

    @property
    def tokens(self) -> float:
        """With the settings that are advised."""
        return self.grouped if self.groups else self.auto

    @property
    def by_tokens(self) -> float:
        """The speed-up over TRL's padded step if time went with the tokens of the decoder alone."""
        return self.padded / self.tokens

    @property
    def speed(self) -> float:
        """The speed-up that `trl-padfix bench` is expected to measure on CPU."""
        return self.speed_of("grouped" if self.groups else "auto")

    def speed_of(self, how: str) -> float:
        """The same of `"real"`, `"auto"` or `"grouped"` batches."""
        tokens = getattr(self, how)
        padded = self.padded * (1 + SCORING) + MASKED / self.hidden_size * self.squares
        return padded / (tokens + SCORING * self.scored) * (self.padded / tokens) ** GROWTH

    def to_dict(self, data: str) -> dict[str, Any]:
        """For JSON, with what follows from the counts, and the verdict on `data` in words."""
        derived = {name: getattr(self, name) for name in ("shares", "groups", "speed", "by_tokens")}
        return asdict(self) | derived | {"lines": verdict_lines(self, data)}


@dataclass(frozen=True)
class PrefixTree:
    """Rows sorted by their tokens: how many each has, and what it has in common with the row before it, `(n,)`."""

    lengths: np.ndarray
    common: np.ndarray


def sample(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> list[dict[str, Any]]:
    """
    The first rows of a dataset, tokenized as TRL does, truncated at the end.

    They have `prompt_ids`, `chosen_ids` and `rejected_ids`, or `input_ids`, and `scored`, how many tokens are trained
    on.
    """
    rows = token_rows(list(checked_rows(dataset, 0, SAMPLE)), tokenizer)
    kept = []
    for row in rows:
        if "input_ids" in row:
            ids = row["input_ids"][:max_length]
            kept.append({"input_ids": ids, "scored": max(0, len(ids) - row["prompt"])})
            continue
        prompt = len(row["prompt_ids"])
        if max_length is not None and prompt >= max_length:
            continue  # TRL leaves them out
        cut = {side: row[side][: None if max_length is None else max_length - prompt] for side in _SIDES}
        kept.append({"prompt_ids": row["prompt_ids"], **cut, "scored": sum(map(len, cut.values()))})
    return kept


def tokenized(dataset: Any) -> list[dict[str, Any]]:
    """The same of rows that are tokenized already, pairs or texts with labels, as `trl-padfix bench` makes them."""
    rows = []
    for row in dataset:
        if "labels" in row:
            rows.append({"input_ids": row["input_ids"], "scored": sum(label != -100 for label in row["labels"])})
        else:
            rows.append({**row, "scored": sum(len(row[side]) for side in _SIDES)})
    return rows


def advise(
    rows: Sequence[dict[str, Any]], *, batch_size: int, budget: int, seed: int = 0, hidden_size: int = 512
) -> Verdict:
    """Count what the batches of a [`sample`] cost in every way; `budget` is the `max_tokens_per_batch` to name."""
    draw, size = np.random.default_rng(seed), min(batch_size, len(rows))
    order = draw.permutation(len(rows))
    is_text = "input_ids" in rows[0]
    costs = (TextMeasure(sharing=True) if is_text else PairMeasure(sharing=True)).examples(rows)
    grouped = group_rows(order, costs, size)
    longest = np.array([max(map(len, _sequences(row))) for row in rows])
    # As transformers does it: sorted by length within fifty batches.
    parts = np.split(order, range(50 * size, len(order), 50 * size))
    by_length = np.concatenate([part[np.argsort(-longest[part], kind="stable")] for part in parts])

    def batches(of: np.ndarray) -> list[np.ndarray]:
        whole = of[: len(of) // size * size].reshape(-1, size)
        return list(whole[draw.permutation(len(whole))[:BATCHES]])

    def padded(batch: np.ndarray) -> float:
        return float(longest[batch].max()) * len(batch) * len(_sequences(rows[0]))

    def square(batch: np.ndarray) -> float:
        equal = len({len(s) for i in batch for s in _sequences(rows[i])}) == 1
        return 0.0 if equal else padded(batch) * float(longest[batch].max())

    def counts(batch: np.ndarray) -> tuple[int, int]:
        return _counts([s for i in batch for s in _sequences(rows[i])])

    random = batches(order)
    real, auto = np.mean([counts(batch) for batch in random], axis=0)
    return Verdict(
        batch_size=size,
        trainer="sft" if is_text else "dpo",
        padded=float(np.mean([padded(batch) for batch in random])),
        grouped_by_length=float(np.mean([padded(batch) for batch in batches(by_length)])),
        real=float(real),
        auto=float(auto),
        grouped=float(np.mean([counts(batch)[1] for batch in batches(grouped)])),
        scored=float(np.mean([sum(rows[i]["scored"] for i in batch) for batch in random])),
        rows=len(rows),
        budget=budget,
        squares=float(np.mean([square(batch) for batch in random])),
        hidden_size=hidden_size,
    )


def prefix_tree(rows: Sequence[dict[str, Any]]) -> PrefixTree:
    """The sequences of a sample in sorted order."""
    sequences = [s for row in rows for s in _sequences(row) if len(s)]
    order, common = prefix_order(sequences)
    return PrefixTree(np.array([len(s) for s in sequences])[order], common)


def verdict_lines(found: Verdict, data: str) -> list[str]:
    """The verdict in words: at most eight lines."""
    saved, more = 1 - found.auto / found.real, 1 - found.grouped / found.auto
    pads = 1 - found.real / found.padded
    settings = ["padding_free=True", 'prefix_sharing="auto"' if found.shares else "prefix_sharing=False"]
    settings += ["group_by_prefix=True"] * found.groups
    unit = "rows" if found.trainer == "sft" else "pairs"
    grouping = f"grouped ones save {more:.0%} more" if found.groups else f"grouping would save {max(more, 0):.0%}"
    lines = [
        f"Use {', '.join(settings)}; {found.batch_size} {unit} a batch, or max_tokens_per_batch={found.budget}.",
        f"Padding is {pads:.0%} of TRL's batches; random batches repeat {saved:.0%} of the rest in prefixes, and "
        f"{grouping}.",
        f"Speed: about {found.speed:.1f}x TRL's padded step as `bench` measures it on CPU, {found.by_tokens:.1f}x by "
        "the tokens of the decoder alone, as with a fused LM head.",
        f"Memory of activations: about {found.tokens / found.padded:.0%} of TRL's padded step, at equal batches.",
        f"TRL's group_by_length: {found.padded / found.grouped_by_length:.1f}x by tokens.",
    ]
    if found.trainer == "sft":
        lines.append(
            f"TRL's padding_free (with FlashAttention) and packing: {found.padded / found.real:.1f}x by tokens, with "
            "no prefix shared."
        )
    else:
        lines.append("TRL's padding_free and packing: none for DPO.")
    flag = " --group-by-prefix" if found.groups else ""
    lines.append(
        f"Measure it: trl-padfix bench --trainer {found.trainer} --data {data} --pairs {found.batch_size} --variants "
        f"trl,padding_free,auto{flag}"
    )
    return lines


_SIDES = ("chosen_ids", "rejected_ids")


def _sequences(row: dict[str, Any]) -> list[list[int]]:
    """The sequences that a batch has of a row."""
    if "input_ids" in row:
        return [row["input_ids"]]
    return [row["prompt_ids"] + row[side] for side in _SIDES]


def _counts(sequences: list[list[int]]) -> tuple[int, int]:
    """Real tokens of a batch, and those that are computed with `prefix_sharing="auto"`."""
    order, common = prefix_order(sequences)
    lengths = np.array([len(s) for s in sequences])[order]
    real, saved, keys = (int(tokens.sum()) for tokens in (lengths, common, lengths[lengths > common]))
    return real, real - saved if saved and saved * KEYS_PER_TOKEN >= keys else real
