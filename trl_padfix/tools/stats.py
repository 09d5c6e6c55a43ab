"""
Token counts of a dataset before any training: padding, shared prefixes, truncation, waiting between processes.

Rows are tokenized as TRL's trainers do. Their lengths are kept, and the length of the prefix that each row shares with
its neighbour in sorted order. All figures follow from these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from datasets import Dataset
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_length_grouped_indices

from ..core.layout.layout import GATHERED_KEYS_PER_TOKEN
from ..trainers.batching.bin_packing import pack_by_budget, partition_equal_rows
from ..trainers.batching.row_order import group_rows
from ..trainers.batching.token_costs import RowCosts, prefix_costs, sort_by_prefix, text_costs, truncated_tokens
from .data import checked_rows
from .formats import trainer_of
from .token_rows import TokenRow, sequences_of, token_rows


__all__ = [
    "BatchTokens", "Lengths", "PrefixTree", "Waiting", "batch_tokens", "check_kept", "check_size", "measure",
    "memory_of", "prefix_tree", "simulate_waiting", "summary", "truncation_counts", "with_completions",
]  # fmt: skip

LARGEST_STEP = 2**15
"""Most rows of an optimizer step that is simulated: it takes about ten seconds."""

DRAWS = 8
"""Epochs of random batches that token counts are averaged over."""

SORTED_BATCHES = 512
"""Batches that are sorted, to count the prefixes that different rows of a batch share."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """
    Tokens of every row of a dataset.

    Attributes:
        columns (`dict[str, np.ndarray]`):
            Tokens of a `text`, or of a `prompt` and the columns that follow it (`chosen` and `rejected`, or
            `completion`), each of shape `(n,)`, before truncation. Completions that GRPO generates are `(n, k)`.
        by_prefix (`tuple[np.ndarray, np.ndarray]`):
            Rows sorted by their first sequences, and the number of tokens that each shares with the one before it,
            both `(n,)`: the result of [`~trl_padfix.trainers.batching.token_costs.sort_by_prefix`].
        max_length (`int`, *optional*), truncation_mode (`str`):
            Truncation that applies to these rows, see [`truncated`].
    """

    columns: dict[str, np.ndarray]
    by_prefix: tuple[np.ndarray, np.ndarray]
    max_length: int | None = None
    truncation_mode: str = "keep_start"

    @classmethod
    def of(cls, rows: Iterable[TokenRow]) -> Lengths:
        """Lengths of the rows of [`token_rows`], whose ids are dropped one by one."""
        lengths: dict[str, list[int]] = {}
        first: list[np.ndarray] = []
        for row in rows:
            ids = {n.removesuffix("_ids").replace("input", "text"): v for n, v in row.items() if n.endswith("_ids")}
            for name, tokens in ids.items():
                lengths.setdefault(name, []).append(len(tokens))
            first.append(np.array(sequences_of(row)[0], dtype=np.uint32))  # a quarter of a list of integers
        columns = {name: np.array(tokens, dtype=np.int64) for name, tokens in lengths.items()}
        return cls(columns, sort_by_prefix(first))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> np.ndarray:
        """Tokens of the prompts, or of the texts, `(n,)`."""
        return next(iter(self.columns.values()))

    @property
    def sequences(self) -> np.ndarray:
        """Tokens of the sequences that a padded batch has of each row, before truncation, `(n, k)`."""
        sides = np.column_stack([tokens for name, tokens in self.columns.items() if name != "prompt"])
        return sides + self.columns["prompt"][:, None] if "prompt" in self.columns else sides

    @property
    def kept_tokens(self) -> np.ndarray:
        """Tokens of [`sequences`] after truncation, `(n, k)`."""
        return np.minimum(self.sequences, self.max_length or np.iinfo(np.int64).max)

    def truncated(self, max_length: int | None, truncation_mode: str = "keep_start") -> Lengths:
        """The rows that TRL trains on with this truncation: it drops those whose prompt alone fills `max_length`."""
        limited = replace(self, max_length=max_length, truncation_mode=truncation_mode)
        if "prompt" not in self.columns or max_length is None or truncation_mode != "keep_start":
            return limited
        keep = self.prompts < max_length
        # A subset of sorted rows shares with its neighbours the minimum over the dropped rows in between, which
        # `RowCosts` computes; its tokens do not matter here.
        costs = RowCosts(self.prompts, *self.by_prefix)[keep]
        columns = {name: tokens[keep] for name, tokens in self.columns.items()}
        return replace(limited, columns=columns, by_prefix=(costs.order, costs.shared))

    def costs(self, sharing: bool = True) -> RowCosts:
        """Tokens of the rows in the decoder without padding; with `sharing`, shared prefixes are computed once."""
        sequences = self.sequences
        tokens, first = truncated_tokens(sequences.T, sequences[:, 0], self.max_length, self.truncation_mode)
        if not sharing:
            return text_costs(tokens)
        # The k sequences of a row share its prompt, and the first one what other rows begin with, too. What the other
        # sequences share beyond that is not looked for.
        tokens = tokens - (sequences.shape[1] - 1) * np.minimum(self.prompts, first)
        return prefix_costs(tokens, first, *self.by_prefix)


@dataclass(frozen=True)
class BatchTokens:
    """Mean tokens of batches of one size: with padding, without padding, and without repeated prefixes."""

    batch_size: int
    padded: float
    real: float
    distinct: float

    @property
    def auto(self) -> float:
        """Tokens with `prefix_sharing="auto"`, by the rule of `Layout.sharing_pays`: every row gathers its keys."""
        return self.distinct if (self.real - self.distinct) * GATHERED_KEYS_PER_TOKEN >= self.real else self.real


class PrefixTree(NamedTuple):
    """
    Sequences sorted by their tokens, which merges them where they begin alike.

    `lengths` are the tokens of each sequence in sorted order, and `shared` those that it has in common with the one
    before it, both `(n,)`. [1, 2, 3], [1, 2, 4] and [5] give 3, 3, 1 and 0, 2, 0.
    """

    lengths: np.ndarray
    shared: np.ndarray


@dataclass(frozen=True)
class Waiting:
    """Share of the time in which processes compute. A forward takes as long as the tokens of its fullest process."""

    processes: int
    fixed: float  # batches of equally many rows, in the order of the data
    budget: float  # micro-batches of a token budget, the rows of a step partitioned by tokens


def measure(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, trainer: str = "", progress: bool = False
) -> Lengths:
    """
    Tokenize a dataset as TRL does for a `trainer`, and keep its lengths and shared prefixes.

    Args:
        dataset (`Dataset`):
            Plain or conversational pairs, texts, answers or prompts, as [`rows_for_trainer`] returns them.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the model.
        trainer (`str`, *optional*):
            `"dpo"`, `"sft"` and so on; by default the one that takes the columns.
        progress (`bool`, *optional*, defaults to `False`):
            Whether to draw a progress bar.

    Raises:
        ValueError: If the dataset is empty or has other columns.
    """
    if len(dataset) == 0:
        raise ValueError("The dataset is empty: check its split or filter.")
    trainer = trainer or trainer_of(dataset)
    chunk = 1000  # rows of one call of the tokenizer
    starts = track(range(0, len(dataset), chunk), "Tokenizing", disable=not progress, transient=True)
    chunks = (token_rows(list(checked_rows(dataset, n, n + chunk)), tokenizer, trainer) for n in starts)
    return Lengths.of(chain.from_iterable(chunks))


def with_completions(prompts: Lengths, generations: int, mean: int, seed: int = 0) -> Lengths:
    """Add `generations` completions to each prompt, with random lengths of 0.75 to 1.25 times the `mean`."""
    low, high = max(1, round(mean * 0.75)), round(mean * 1.25)
    completions = np.random.default_rng(seed).integers(low, high + 1, (len(prompts), generations))
    return replace(prompts, columns={**prompts.columns, "completion": completions})


def check_size(processes: int, batch_size: int, accumulation: int) -> None:
    """Raise a `ValueError` for a step of so many rows that its simulation would take minutes."""
    rows = processes * batch_size * accumulation
    if rows > LARGEST_STEP:
        raise ValueError(
            f"{processes} processes with {accumulation} x {batch_size} rows each make a step of {rows:,} rows, and at "
            f"most {LARGEST_STEP:,} are simulated. Lower `--world-size`, `--batch-size` or `--accumulation`."
        )


def check_kept(kept: Lengths) -> None:
    """Raise a `ValueError` if TRL would train on none of the rows, see [`Lengths.truncated`]."""
    if not len(kept):
        raise ValueError(
            f"max_length={kept.max_length} ({kept.truncation_mode}) leaves no row: every prompt alone is as long. "
            "Raise it, or give 0 for any length."
        )
    if not kept.sequences.any():
        raise ValueError("No row has a token: every text is empty. Check the columns and the tokenizer.")


def batch_tokens(lengths: Lengths, size: int, *, order: str = "random", seed: int = 0) -> BatchTokens:
    """
    Mean tokens of full batches of `size` rows.

    Args:
        lengths ([`Lengths`]):
            At least `size` rows.
        size (`int`):
            Rows of a batch.
        order (`str`, *optional*, defaults to `"random"`):
            How batches are formed: `"random"`, by `"prefix"` as `group_by_prefix` does, or by `"length"` as
            transformers' `group_by_length` does.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random order.
    """
    costs, tokens = lengths.costs(), lengths.kept_tokens
    draw = np.random.default_rng(seed)
    epochs = [draw.permutation(len(lengths)) for _ in range(DRAWS if order == "random" else 1)]
    if order == "prefix":
        epochs = [epoch[group_rows(costs[epoch], size)] for epoch in epochs]
    elif order == "length":
        generator = torch.Generator().manual_seed(seed)
        epochs = [np.array(get_length_grouped_indices(tokens.max(1).tolist(), size, generator=generator))]
    full = len(lengths) // size * size  # rows of full batches
    batches = np.stack([epoch[:full] for epoch in epochs]).reshape(-1, size)
    padded = tokens[batches].max((1, 2)) * size * tokens.shape[1]
    distinct = costs.tokens[batches].sum(1).mean()
    if costs.shared.any():
        # Prefixes between rows are counted in some batches only: each has to be sorted.
        counted = draw.permutation(batches)[:SORTED_BATCHES]
        distinct -= np.mean([costs[batch].shared.sum() for batch in counted])
    real = lengths.costs(sharing=False).tokens[batches].sum(1)
    return BatchTokens(size, float(padded.mean()), float(real.mean()), float(distinct))


def prefix_tree(lengths: Lengths) -> PrefixTree:
    """The sequences of all rows in sorted order, with those prefixes that [`Lengths.costs`] counts."""
    order, shared = lengths.by_prefix
    tokens = lengths.kept_tokens[order]
    in_common = np.repeat(lengths.prompts[order, None], tokens.shape[1], axis=1)  # the sequences of a row: its prompt
    in_common[:, 0] = shared
    return PrefixTree(tokens.ravel(), np.minimum(in_common, tokens).ravel())


def truncation_counts(lengths: Lengths, kept: Lengths) -> dict[str, int]:
    """Numbers of rows: all, those that lose tokens in [`Lengths.truncated`], and those that it drops."""
    truncated = int((kept.sequences > kept.kept_tokens).any(1).sum())
    return {"rows": len(lengths), "truncated": truncated, "dropped": len(lengths) - len(kept)}


def simulate_waiting(
    costs: RowCosts, processes: int, *, batch_size: int = 8, accumulation: int = 4, budget: int | None = None,
    seed: int = 0, grouped: bool = False,
) -> Waiting:  # fmt: skip
    """
    Simulate how long processes wait for the one with the most tokens.

    Processes meet in every forward, as under FSDP and ZeRO-3. A step has `batch_size * accumulation * processes` rows;
    a smaller dataset is repeated.

    Args:
        costs (`RowCosts`):
            Tokens of the rows.
        processes (`int`):
            Number of processes.
        batch_size (`int`, *optional*, defaults to `8`):
            Rows of a forward on one process, with fixed batches.
        accumulation (`int`, *optional*, defaults to `4`):
            Forwards of a step, with fixed batches.
        budget (`int`, *optional*):
            `max_tokens_per_batch`; by default [`memory_of`] the fixed batches.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random order.
        grouped (`bool`, *optional*, defaults to `False`):
            Whether steps are those of `group_by_prefix`, and shared prefixes are computed once in a forward.
    """
    budget = budget or memory_of(costs, batch_size)
    rows = batch_size * accumulation * processes
    steps = min(32, max(2, 40_000 // rows))
    draw = np.random.default_rng(seed)
    epochs = [draw.permutation(len(costs)) for _ in range(-(-steps * rows // len(costs)))]
    if grouped:
        epochs = [epoch[group_rows(costs[epoch], rows)] for epoch in epochs]
    order = np.concatenate(epochs)[: steps * rows].reshape(steps, rows)
    # Row 0: fixed batches; row 1: a token budget. Column 0: computed tokens; column 1: those of the same time without
    # waiting, which are processes * tokens of the fullest process in each forward.
    totals = np.zeros((2, 2))
    forwards = np.arange(rows).reshape(accumulation, processes, batch_size)
    for step in order:
        step_costs = costs[step] if grouped else text_costs(costs.tokens[step])
        if grouped:
            fixed_loads = np.array([[step_costs.total(batch) for batch in batches] for batches in forwards])
        else:  # the same without a sort of each batch, since nothing is shared
            fixed_loads = step_costs.tokens[forwards].sum(2)
        for total, loads in zip(totals, (fixed_loads, _budget_loads(step_costs, processes, budget)), strict=True):
            total += [loads.sum(), processes * loads.max(1).sum()]
    fixed, by_budget = totals[:, 0] / totals[:, 1]
    return Waiting(processes, float(fixed), float(by_budget))


def _budget_loads(costs: RowCosts, processes: int, budget: int) -> np.ndarray:
    """
    Tokens of each micro-batch of a step on each process, `(most micro-batches, processes)`.

    A process with fewer micro-batches than another one has zeros at the end: it waits.
    """
    loads = []
    for rows in partition_equal_rows(costs, processes):
        local = costs[rows]
        loads.append([local.total(micro_batch) for micro_batch in pack_by_budget(local, budget)])
    return np.array(list(zip_longest(*loads, fillvalue=0)))


def memory_of(costs: RowCosts, batch_size: int, seed: int = 0) -> int:
    """Most tokens among a thousand random batches: what a device has room for if it trains with fixed batches."""
    draw = np.random.default_rng(seed)
    return max(int(costs.tokens[draw.integers(len(costs), size=batch_size)].sum()) for _ in range(1000))


def summary(lengths: Lengths) -> dict[str, dict[str, float]]:
    """Mean, median, 95th percentile and maximum of the tokens of each column, and of complete sequences."""
    columns = {name: tokens.ravel() for name, tokens in lengths.columns.items()}
    if "prompt" in columns:
        columns["sequence"] = lengths.sequences.ravel()
    return {
        name: {
            "mean": float(tokens.mean()),
            "median": float(np.median(tokens)),
            "p95": float(np.percentile(tokens, 95)),
            "max": float(tokens.max()),
        }
        for name, tokens in columns.items()
    }
