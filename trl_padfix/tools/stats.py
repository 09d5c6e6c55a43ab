"""
What a dataset's lengths say about padding, before anything is trained.

Rows are tokenized as TRL's trainers do; what is kept of them is their lengths, and what they begin with in common.
Everything else is counted from those: how many tokens batches hold, what `max_length` cuts off, and how long processes
would wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length, extract_prompt, is_conversational

from ..trainers.batching.bin_packing import balance, split
from ..trainers.batching.prefix_groups import group_rows, sort_by_prefix
from ..trainers.batching.token_costs import RowCosts, prefix_costs, text_costs, truncated_tokens
from ..trainers.data.row_checks import TRAINED
from ..trainers.data.turns import renderer
from .data import checked_rows, texts_of_row
from .formats import trainer_of


__all__ = [
    "BatchTokens",
    "Lengths",
    "Waiting",
    "batch_tokens",
    "check_kept",
    "check_size",
    "measure",
    "sequences_of",
    "summary",
    "texts_of",
    "token_rows",
    "truncated",
    "waiting",
    "with_completions",
]

LARGEST_STEP = 2**15
"""Most rows of an optimizer step that is simulated: some ten seconds."""

DRAWS = 8
"""Epochs of random batches that token counts are averaged over."""

SHARED = 512
"""Random batches that are sorted, to count what different rows of a batch begin with in common."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """
    Tokens of every row of a dataset, as TRL's trainer would have them before truncation.

    `parts` are a `text`, or a `prompt` and what follows it (`chosen` and `rejected`, or `completion`), each `(n,)`;
    completions that GRPO generates are `(n, k)`. `sorted` are the rows sorted by their prompts or texts, and how many
    tokens each has in common with the one before it, both `(n,)`.
    """

    parts: dict[str, np.ndarray]
    sorted: tuple[np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    @property
    def sequences(self) -> np.ndarray:
        """Tokens of the sequences that a padded batch has of each row, `(n, k)`."""
        sides = np.column_stack([part for name, part in self.parts.items() if name != "prompt"])
        return sides + self.parts["prompt"][:, None] if "prompt" in self.parts else sides

    def kept(self, max_length: int | None, truncation_mode: str = "keep_start") -> Lengths:
        """The rows that TRL trains on: those whose prompt alone fills `max_length` are left out."""
        if "prompt" not in self.parts or max_length is None or truncation_mode != "keep_start":
            return self
        keep = self.parts["prompt"] < max_length
        kept = None if self.sorted is None else RowCosts(self.parts["prompt"], *self.sorted)[keep]
        parts = {name: part[keep] for name, part in self.parts.items()}
        return Lengths(parts, kept and (kept.order, kept.common))

    def costs(self, max_length: int | None, truncation_mode: str = "keep_start", sharing: bool = True) -> RowCosts:
        """Tokens that rows put through the decoder without padding, with common prefixes computed once or not."""
        begins, sequences = next(iter(self.parts.values())), self.sequences
        each, begins = truncated_tokens(sequences.T, begins, max_length, truncation_mode)
        if sharing and "prompt" in self.parts:
            each = each - (sequences.shape[1] - 1) * begins
        return prefix_costs(each, begins, *self.sorted) if sharing and self.sorted else text_costs(each)


@dataclass(frozen=True)
class BatchTokens:
    """Tokens of random batches of one size, on average: with padding, without, and without repeated prefixes."""

    batch_size: int
    padded: float
    real: float
    distinct: float


@dataclass(frozen=True)
class Waiting:
    """Share of the time that processes compute, a forward taking as long as its tokens on the fullest process."""

    processes: int
    fixed: float  # with batches of equally many rows as they come
    budget: float  # with the rows of a step dealt out evenly and split by a token budget


def measure(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, trainer: str = "", progress: bool = False
) -> Lengths:
    """
    Tokenize a dataset as TRL does for a `trainer`, and keep its lengths and what its rows begin with in common.

    It holds what [`of_trainer`] returns: plain or conversational pairs, texts, answers or prompts; by default it is
    for the trainer that takes its columns. Anything else is a `ValueError`.
    """
    if len(dataset) == 0:
        raise ValueError("The dataset is empty: check its split or filter.")
    trainer = trainer or trainer_of(dataset)
    size = 1000
    batches = track(range(0, len(dataset), size), "Tokenizing", disable=not progress, transient=True)
    lengths: dict[str, list[int]] = {}
    begins: list[np.ndarray] = []
    for at in batches:
        for row in token_rows(list(checked_rows(dataset, at, at + size)), tokenizer, trainer):
            ids = {n.removesuffix("_ids").replace("input", "text"): v for n, v in row.items() if n.endswith("_ids")}
            for name, part in ids.items():
                lengths.setdefault(name, []).append(len(part))
            begins.append(np.array(next(iter(ids.values())), dtype=np.uint32))
    return Lengths({name: np.array(part, dtype=np.int64) for name, part in lengths.items()}, sort_by_prefix(begins))


def with_completions(prompts: Lengths, generations: int, mean: int, seed: int = 0) -> Lengths:
    """Prompts, each with as many completions of random lengths, a quarter more or less than their mean."""
    low, high = max(1, round(mean * 0.75)), round(mean * 1.25)
    drawn = np.random.default_rng(seed).integers(low, high + 1, (len(prompts), generations))
    return Lengths({**prompts.parts, "completion": drawn}, prompts.sorted)


def texts_of(dataset: Dataset) -> Iterator[str]:
    """All text of a dataset, plain or conversational, to train a tokenizer on."""
    names = [name for name in dataset.column_names if name in TRAINED]
    for row in checked_rows(dataset.select_columns(names)):
        yield from texts_of_row(row)


def check_size(processes: int, batch_size: int, accumulation: int) -> None:
    """Refuse, with a `ValueError`, a step of so many rows that it would take minutes to simulate."""
    rows = processes * batch_size * accumulation
    if rows > LARGEST_STEP:
        raise ValueError(
            f"{processes} processes with {accumulation} x {batch_size} rows each make a step of {rows:,} rows, and at "
            f"most {LARGEST_STEP:,} are simulated. Lower `--world-size`, `--batch-size` or `--accumulation`."
        )


def check_kept(lengths: Lengths, max_length: int | None, truncation_mode: str) -> None:
    """Refuse, with a `ValueError`, rows of which TRL would train on none."""
    if not len(lengths.kept(max_length, truncation_mode)):
        raise ValueError(
            f"max_length={max_length} ({truncation_mode}) leaves no row: every prompt alone is as long. Raise it, or "
            "give 0 for any length."
        )
    if not lengths.sequences.any():
        raise ValueError("No row has a token: every text is empty. Check the columns and the tokenizer.")


def batch_tokens(
    lengths: Lengths, batch_sizes: Sequence[int], *, max_length: int | None = None, seed: int = 0,
    grouped: bool = False, **how: Any,
) -> list[BatchTokens]:  # fmt: skip
    """
    Tokens of batches, averaged: random ones, or `grouped` ones of rows that begin alike. Sizes that the dataset cannot
    fill are left out.
    """
    sequences = np.minimum(lengths.sequences, max_length or np.iinfo(np.int64).max)
    real = lengths.costs(max_length, sharing=False, **how).each
    costs = lengths.costs(max_length, **how)
    draw = np.random.default_rng(seed)
    found = []
    for size in (s for s in batch_sizes if s <= len(lengths)):
        whole = len(lengths) // size * size
        drawn = [draw.permutation(len(lengths)) for _ in range(1 if grouped else DRAWS)]
        if grouped:
            drawn = [group_rows(order, costs, size) for order in drawn]
        orders = np.stack([order[:whole] for order in drawn]).reshape(-1, size)
        padded = sequences[orders].max((1, 2)) * size * sequences.shape[1]
        distinct = costs.each[orders].sum(1).mean()
        if costs.common.any():
            some = orders if len(orders) <= SHARED else orders[draw.choice(len(orders), SHARED, replace=False)]
            distinct -= np.mean([costs[batch].common.sum() for batch in some])
        found.append(BatchTokens(size, padded.mean(), real[orders].sum(1).mean(), float(distinct)))
    return found


def truncated(lengths: Lengths, max_length: int | None, truncation_mode: str = "keep_start") -> dict[str, int]:
    """How many rows lose tokens to `max_length`, and how many TRL leaves out since only their prompt would be left."""
    kept = lengths.kept(max_length, truncation_mode)
    cut = 0 if max_length is None else int((kept.sequences > max_length).any(1).sum())
    return {"rows": len(lengths), "truncated": cut, "dropped": len(lengths) - len(kept)}


def waiting(
    costs: RowCosts, processes: int, *, batch_size: int = 8, accumulation: int = 4, budget: int | None = None,
    seed: int = 0, grouped: bool = False,
) -> Waiting:  # fmt: skip
    """
    Simulate how long processes would wait for the one with the most tokens.

    Processes meet in every forward, as FSDP and ZeRO-3 have it. An optimizer step has `batch_size` x `accumulation`
    rows on each process; datasets with fewer are gone through several times. `budget` is `max_tokens_per_batch`, by
    default [`memory_of`] the fixed batches. In `grouped` steps rows that begin alike are together, and what they begin
    with is counted once in a forward.
    """
    budget = budget or memory_of(costs, batch_size)
    rows = batch_size * accumulation * processes
    steps = min(32, max(2, 40_000 // rows))
    draw = np.random.default_rng(seed)
    epochs = [draw.permutation(len(costs)) for _ in range(-(-steps * rows // len(costs)))]
    if grouped:
        epochs = [group_rows(epoch, costs, rows) for epoch in epochs]
    order = np.concatenate(epochs)[: steps * rows].reshape(steps, rows)
    fixed, split_up = np.zeros((2, 2))  # tokens, and processes times those of the fullest one
    for step in order:
        own = costs[step] if grouped else text_costs(costs.each[step])
        forwards = np.arange(rows).reshape(accumulation, processes, batch_size)
        loads = own.each[forwards].sum(2)
        if grouped:
            loads = np.array([[own.total(part) for part in parts] for parts in forwards])
        fixed += [loads.sum(), processes * loads.max(1).sum()]
        slowest: list[int] = []
        for part in balance(own, processes):
            of_part = own[part]
            for i, micro_batch in enumerate(split(of_part, budget)):
                slowest += [0] * (i + 1 - len(slowest))
                load = of_part.total(micro_batch) if grouped else int(of_part.each[micro_batch].sum())
                slowest[i] = max(slowest[i], load)
                split_up[0] += load
        split_up[1] += processes * sum(slowest)
    return Waiting(processes, float(fixed[0] / fixed[1]), float(split_up[0] / split_up[1]))


def memory_of(costs: RowCosts, batch_size: int, seed: int = 0) -> int:
    """The most tokens of a random batch, of a thousand: what a device has room for if it trains by fixed batches."""
    draw, each = np.random.default_rng(seed), costs.each
    return max(int(each[draw.integers(len(costs), size=batch_size)].sum()) for _ in range(1000))


def summary(lengths: Lengths) -> dict[str, dict[str, float]]:
    """Mean, median, 95th percentile and most tokens of each part, and of whole sequences."""
    parts = {name: part.ravel() for name, part in lengths.parts.items()}
    if "prompt" in parts:
        parts["sequence"] = lengths.sequences.ravel()
    return {
        name: {
            "mean": float(part.mean()),
            "median": float(np.median(part)),
            "p95": float(np.percentile(part, 95)),
            "max": float(part.max()),
        }
        for name, part in parts.items()
    }


def token_rows(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, trainer: str = ""
) -> list[dict[str, Any]]:
    """
    Rows as TRL's trainer tokenizes them, before truncation.

    Of pairs `prompt_ids`, `chosen_ids` and `rejected_ids`; for KTO `prompt_ids` and `completion_ids`, for GRPO
    `prompt_ids`; of texts `input_ids`, and `prompt`, how many of them are a prompt that is not trained on.
    """
    if not rows:
        return []
    if "chosen" in rows[0]:
        if "prompt" not in rows[0]:
            rows = [extract_prompt(row) for row in rows]
        prompts = _token_ids(rows, ["prompt"], tokenizer)
        both = [_token_ids(rows, ["prompt", side], tokenizer) for side in ("chosen", "rejected")]
        found = []
        for prompt, chosen, rejected in zip(prompts, *both, strict=True):
            at = min(_common(prompt, chosen), _common(prompt, rejected))
            found.append({"prompt_ids": chosen[:at], "chosen_ids": chosen[at:], "rejected_ids": rejected[at:]})
        return found
    prompts = _token_ids(rows, ["prompt"], tokenizer) if "prompt" in rows[0] else [[]] * len(rows)
    if trainer in ("grpo", "rloo"):
        return [{"prompt_ids": prompt} for prompt in prompts]
    names = ["prompt", "completion"] if "prompt" in rows[0] else ["text" if "text" in rows[0] else "messages"]
    whole = _token_ids(rows, names, tokenizer)
    begins = [_common(prompt, ids) for prompt, ids in zip(prompts, whole, strict=True)]
    if trainer == "kto":
        parts = zip(begins, whole, strict=True)
        return [{"prompt_ids": ids[:at], "completion_ids": ids[at:]} for at, ids in parts]
    return [{"input_ids": ids, "prompt": at} for at, ids in zip(begins, whole, strict=True)]


def sequences_of(row: dict[str, Any]) -> list[list[int]]:
    """The sequences that a batch has of a row of [`token_rows`]: a text, a prompt with each that follows, or alone."""
    if "input_ids" in row:
        return [row["input_ids"]]
    ends = row.get("completions") or [row[side] for side in SIDES if side in row] or [[]]
    return [row["prompt_ids"] + end for end in ends]


SIDES = ("chosen_ids", "rejected_ids", "completion_ids")


def _token_ids(rows: list[dict[str, Any]], names: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of what stands in the columns `names`, one after another, as TRL puts it before the model."""
    conversational, is_prompt, eos = is_conversational(rows[0]), names == ["prompt"], str(tokenizer.eos_token or "")
    texts: list[str] = []
    for row in rows:
        if conversational:
            messages = [message for name in names for message in row[name]]
            texts.append(renderer(row, tokenizer)(messages, add_generation_prompt=is_prompt))
        else:
            text = "".join(row[name] for name in names)
            texts.append(text if is_prompt or text.endswith(eos) else text + eos)
    return tokenizer(texts, add_special_tokens=not conversational, verbose=False)["input_ids"]  # type: ignore[return-value]


def _common(ids: list[int], others: list[int]) -> int:
    return len(ids) if others[: len(ids)] == ids else common_prefix_length(ids, others)
