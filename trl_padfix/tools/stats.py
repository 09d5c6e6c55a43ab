"""
Token counts of a dataset before any training: padding, shared prefixes, truncation, waiting between processes.

Rows are tokenized as TRL's trainers do. Their lengths are kept, and the length of the prefix that each row shares with
its neighbour in sorted order. All figures follow from these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length, extract_prompt, is_conversational

from ..trainers.batching.bin_packing import pack_by_budget, partition_by_tokens
from ..trainers.batching.prefix_groups import group_rows, sort_by_prefix
from ..trainers.batching.token_costs import RowCosts, prefix_costs, text_costs, truncated_tokens
from ..trainers.data.row_checks import TRAINED
from ..trainers.data.turns import renderer
from .data import checked_rows, texts_of_row
from .formats import trainer_of


__all__ = [
    "SAMPLE",
    "SIDES",
    "BatchTokens",
    "Lengths",
    "TokenRow",
    "Waiting",
    "batch_tokens",
    "check_kept",
    "check_size",
    "measure",
    "memory_of",
    "sequences_of",
    "simulate_waiting",
    "summary",
    "texts_of",
    "token_rows",
    "truncation_counts",
    "with_completions",
]

TokenRow: TypeAlias = dict[str, Any]
"""A tokenized row: lists of token ids, and perhaps the number of prompt tokens."""

LARGEST_STEP = 2**15
"""Most rows of an optimizer step that is simulated: it takes about ten seconds."""

DRAWS = 8
"""Epochs of random batches that token counts are averaged over."""

SORTED_BATCHES = 512
"""Random batches that are sorted, to count the prefixes that different rows of a batch share."""

SAMPLE = 4096
"""Rows whose token ids are kept: the first ones, because rows with long shared prefixes often stand together."""

SIDES = ("chosen_ids", "rejected_ids", "completion_ids")
"""Columns of [`token_rows`] that follow a prompt."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """
    Tokens of every row of a dataset, as TRL's trainer has them before truncation.

    Attributes:
        columns (`dict[str, np.ndarray]`):
            Tokens of a `text`, or of a `prompt` and the columns that follow it (`chosen` and `rejected`, or
            `completion`), each of shape `(n,)`. Completions that GRPO generates are `(n, k)`.
        by_prefix (`tuple[np.ndarray, np.ndarray]`, *optional*):
            Rows sorted by their prompts or texts, and the number of tokens that each shares with the one before it,
            both `(n,)`: the result of [`~trl_padfix.trainers.batching.prefix_groups.sort_by_prefix`].
        sample (`tuple[TokenRow, ...]`):
            The first [`SAMPLE`] rows with their token ids.
    """

    columns: dict[str, np.ndarray]
    by_prefix: tuple[np.ndarray, np.ndarray] | None = None
    sample: tuple[TokenRow, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def sequences(self) -> np.ndarray:
        """Tokens of the sequences that a padded batch has of each row, `(n, k)`."""
        sides = np.column_stack([tokens for name, tokens in self.columns.items() if name != "prompt"])
        return sides + self.columns["prompt"][:, None] if "prompt" in self.columns else sides

    def kept_rows(self, max_length: int | None, truncation_mode: str = "keep_start") -> Lengths:
        """The rows that TRL trains on: it drops those whose prompt alone fills `max_length`."""
        if "prompt" not in self.columns or max_length is None or truncation_mode != "keep_start":
            return self
        keep = self.columns["prompt"] < max_length
        columns = {name: tokens[keep] for name, tokens in self.columns.items()}
        if self.by_prefix is None:
            return Lengths(columns)
        # A subset of sorted rows shares with its neighbours the minimum over the dropped rows in between, which
        # `RowCosts` computes; its tokens do not matter here.
        costs = RowCosts(self.columns["prompt"], *self.by_prefix)[keep]
        return Lengths(columns, (costs.order, costs.shared))

    def costs(self, max_length: int | None, truncation_mode: str = "keep_start", sharing: bool = True) -> RowCosts:
        """Tokens of the rows in the decoder without padding; with `sharing`, shared prefixes are computed once."""
        prompts, sequences = next(iter(self.columns.values())), self.sequences
        tokens, prompts = truncated_tokens(sequences.T, prompts, max_length, truncation_mode)
        if sharing and "prompt" in self.columns:
            tokens = tokens - (sequences.shape[1] - 1) * prompts  # the k sequences of a row share its prompt
        return prefix_costs(tokens, prompts, *self.by_prefix) if sharing and self.by_prefix else text_costs(tokens)


@dataclass(frozen=True)
class BatchTokens:
    """Mean tokens of batches of one size: with padding, without padding, and without repeated prefixes."""

    batch_size: int
    padded: float
    real: float
    distinct: float


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
    lengths: dict[str, list[int]] = {}
    prompts: list[np.ndarray] = []
    sample: list[TokenRow] = []
    for start in starts:
        rows = token_rows(list(checked_rows(dataset, start, start + chunk)), tokenizer, trainer)
        sample += rows[: SAMPLE - len(sample)]
        for row in rows:
            ids = {n.removesuffix("_ids").replace("input", "text"): v for n, v in row.items() if n.endswith("_ids")}
            for name, tokens in ids.items():
                lengths.setdefault(name, []).append(len(tokens))
            prompts.append(np.array(next(iter(ids.values())), dtype=np.uint32))  # a quarter of a list of integers
    columns = {name: np.array(tokens, dtype=np.int64) for name, tokens in lengths.items()}
    return Lengths(columns, sort_by_prefix(prompts), tuple(sample))


def with_completions(prompts: Lengths, generations: int, mean: int, seed: int = 0) -> Lengths:
    """Add `generations` completions to each prompt, with random lengths of 0.75 to 1.25 times the `mean`."""
    low, high = max(1, round(mean * 0.75)), round(mean * 1.25)
    completions = np.random.default_rng(seed).integers(low, high + 1, (len(prompts), generations))
    return replace(prompts, columns={**prompts.columns, "completion": completions})


def texts_of(dataset: Dataset) -> Iterator[str]:
    """All text of a dataset, plain or conversational, to train a tokenizer on."""
    names = [name for name in dataset.column_names if name in TRAINED]
    for row in checked_rows(dataset.select_columns(names)):
        yield from texts_of_row(row)


def check_size(processes: int, batch_size: int, accumulation: int) -> None:
    """Raise a `ValueError` for a step of so many rows that its simulation would take minutes."""
    rows = processes * batch_size * accumulation
    if rows > LARGEST_STEP:
        raise ValueError(
            f"{processes} processes with {accumulation} x {batch_size} rows each make a step of {rows:,} rows, and at "
            f"most {LARGEST_STEP:,} are simulated. Lower `--world-size`, `--batch-size` or `--accumulation`."
        )


def check_kept(lengths: Lengths, max_length: int | None, truncation_mode: str) -> None:
    """Raise a `ValueError` if TRL would train on none of the rows."""
    if not len(lengths.kept_rows(max_length, truncation_mode)):
        raise ValueError(
            f"max_length={max_length} ({truncation_mode}) leaves no row: every prompt alone is as long. Raise it, or "
            "give 0 for any length."
        )
    if not lengths.sequences.any():
        raise ValueError("No row has a token: every text is empty. Check the columns and the tokenizer.")


def batch_tokens(
    lengths: Lengths, batch_sizes: Sequence[int], *, max_length: int | None = None,
    truncation_mode: str = "keep_start", seed: int = 0, grouped: bool = False,
) -> list[BatchTokens]:  # fmt: skip
    """
    Mean tokens of random batches, or of the batches of `group_by_prefix` if `grouped`.

    Sizes that the dataset cannot fill are left out.
    """
    sequences = np.minimum(lengths.sequences, max_length or np.iinfo(np.int64).max)
    real = lengths.costs(max_length, truncation_mode, sharing=False).tokens
    costs = lengths.costs(max_length, truncation_mode)
    draw = np.random.default_rng(seed)
    result = []
    for size in (s for s in batch_sizes if s <= len(lengths)):
        full = len(lengths) // size * size  # rows of full batches
        epochs = [draw.permutation(len(lengths)) for _ in range(1 if grouped else DRAWS)]
        if grouped:
            epochs = [group_rows(epoch, costs, size) for epoch in epochs]
        batches = np.stack([epoch[:full] for epoch in epochs]).reshape(-1, size)
        padded = sequences[batches].max((1, 2)) * size * sequences.shape[1]
        distinct = costs.tokens[batches].sum(1).mean()
        if costs.shared.any():
            # Prefixes between rows are counted in some batches only: each has to be sorted.
            chosen = slice(None)
            if len(batches) > SORTED_BATCHES:
                chosen = draw.choice(len(batches), SORTED_BATCHES, replace=False)
            distinct -= np.mean([costs[batch].shared.sum() for batch in batches[chosen]])
        result.append(BatchTokens(size, padded.mean(), real[batches].sum(1).mean(), float(distinct)))
    return result


def truncation_counts(lengths: Lengths, max_length: int | None, truncation_mode: str = "keep_start") -> dict[str, int]:
    """Numbers of rows: all, those that lose tokens to `max_length`, and those that TRL drops for their long prompt."""
    kept = lengths.kept_rows(max_length, truncation_mode)
    truncated = 0 if max_length is None else int((kept.sequences > max_length).any(1).sum())
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
        epochs = [group_rows(epoch, costs, rows) for epoch in epochs]
    order = np.concatenate(epochs)[: steps * rows].reshape(steps, rows)
    # Row 0: fixed batches; row 1: a token budget. Column 0: computed tokens; column 1: those of the same time without
    # waiting, which are processes * tokens of the fullest process.
    totals = np.zeros((2, 2))
    forwards = np.arange(rows).reshape(accumulation, processes, batch_size)
    for step in order:
        step_costs = costs[step] if grouped else text_costs(costs.tokens[step])
        if grouped:
            loads = np.array([[step_costs.total(batch) for batch in batches] for batches in forwards])
        else:  # the same without a sort of each batch, since nothing is shared
            loads = step_costs.tokens[forwards].sum(2)
        totals[0] += [loads.sum(), processes * loads.max(1).sum()]
        loads = _budget_loads(step_costs, processes, budget)
        totals[1] += [loads.sum(), processes * loads.max(0).sum()]
    fixed, by_budget = totals[:, 0] / totals[:, 1]
    return Waiting(processes, float(fixed), float(by_budget))


def _budget_loads(costs: RowCosts, processes: int, budget: int) -> np.ndarray:
    """
    Tokens of each micro-batch of a step on each process, `(processes, most micro-batches)`.

    A process with fewer micro-batches than another one has zeros at the end: it waits.
    """
    loads = []
    for rows in partition_by_tokens(costs, processes):
        local = costs[rows]
        loads.append([local.total(micro_batch) for micro_batch in pack_by_budget(local, budget)])
    most = max(map(len, loads))
    return np.array([[*local, *[0] * (most - len(local))] for local in loads])


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


def token_rows(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, trainer: str = "") -> list[TokenRow]:
    """
    Tokenize rows as TRL's trainer does, before truncation.

    Returns:
        `list[TokenRow]`: For pairs `prompt_ids`, `chosen_ids` and `rejected_ids`; for KTO `prompt_ids` and
        `completion_ids`; for GRPO `prompt_ids`; for texts `input_ids`, and in `prompt` the number of tokens at their
        beginning that are not trained on.
    """
    if not rows:
        return []
    if "chosen" in rows[0]:
        return _token_pairs(rows, tokenizer)
    prompts = _token_ids(rows, ["prompt"], tokenizer) if "prompt" in rows[0] else [[]] * len(rows)
    if trainer in ("grpo", "rloo"):
        return [{"prompt_ids": prompt} for prompt in prompts]
    names = ["prompt", "completion"] if "prompt" in rows[0] else ["text" if "text" in rows[0] else "messages"]
    sequences = _token_ids(rows, names, tokenizer)
    # A token may span the end of a prompt. Then the prompt ends before that token, as in TRL.
    ends = [_common(prompt, ids) for prompt, ids in zip(prompts, sequences, strict=True)]
    if trainer == "kto":
        pairs = zip(ends, sequences, strict=True)
        return [{"prompt_ids": ids[:end], "completion_ids": ids[end:]} for end, ids in pairs]
    return [{"input_ids": ids, "prompt": end} for end, ids in zip(ends, sequences, strict=True)]


def _token_pairs(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[TokenRow]:
    if "prompt" not in rows[0]:
        rows = [extract_prompt(row) for row in rows]
    prompts = _token_ids(rows, ["prompt"], tokenizer)
    both = [_token_ids(rows, ["prompt", side], tokenizer) for side in ("chosen", "rejected")]
    result = []
    for prompt, chosen, rejected in zip(prompts, *both, strict=True):
        end = min(_common(prompt, chosen), _common(prompt, rejected))
        result.append({"prompt_ids": chosen[:end], "chosen_ids": chosen[end:], "rejected_ids": rejected[end:]})
    return result


def sequences_of(row: TokenRow) -> list[list[int]]:
    """The sequences that a batch has of a row of [`token_rows`]: a text, or its prompt with each completion."""
    if "input_ids" in row:
        return [row["input_ids"]]
    completions = row.get("completions") or [row[side] for side in SIDES if side in row] or [[]]
    return [row["prompt_ids"] + ids for ids in completions]


def _token_ids(rows: list[dict[str, Any]], names: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of the columns `names`, joined as TRL joins them for the model."""
    conversational, is_prompt, eos = is_conversational(rows[0]), names == ["prompt"], str(tokenizer.eos_token or "")
    texts: list[str] = []
    for row in rows:
        if conversational:
            messages = [message for name in names for message in row[name]]
            texts.append(renderer(row, tokenizer)(messages, add_generation_prompt=is_prompt))
        else:
            text = "".join(row[name] for name in names)
            # TRL ends each plain sequence with EOS, unless it ends so already.
            texts.append(text if is_prompt or text.endswith(eos) else text + eos)
    # Chat templates write the special tokens themselves.
    return tokenizer(texts, add_special_tokens=not conversational, verbose=False)["input_ids"]  # type: ignore[return-value]


def _common(ids: list[int], others: list[int]) -> int:
    """Tokens that both begin with; the comparison of slices is the fast path."""
    return len(ids) if others[: len(ids)] == ids else common_prefix_length(ids, others)
