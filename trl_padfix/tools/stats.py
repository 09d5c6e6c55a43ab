"""
What a dataset's lengths say about padding, before anything is trained.

Rows are tokenized as TRL's trainers do; what is kept of them is their lengths, and what they begin with in common.
Everything else is counted from those: how many tokens batches hold, what `max_length` cuts off, and how long processes
would wait for one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length, extract_prompt, is_conversational

from ..trainers.steps.costs import RowCosts, prefix_costs, text_costs, truncated_tokens
from ..trainers.steps.dealing import balance, split
from ..trainers.steps.grouping import prefix_order
from .data import TEXT_COLUMNS, checked_rows, texts_of_row


__all__ = [
    "BatchTokens",
    "Lengths",
    "Waiting",
    "batch_tokens",
    "check_kept",
    "check_size",
    "measure",
    "summary",
    "texts_of",
    "token_rows",
    "truncated",
    "waiting",
]

LARGEST_STEP = 2**15
"""Most rows of an optimizer step that is simulated: some ten seconds."""

_PAIR = ("prompt", "chosen", "rejected")

DRAWS = 8
"""Epochs of random batches that token counts are averaged over."""

SHARED = 512
"""Random batches that are sorted, to count what different rows of a batch begin with in common."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """
    Tokens of every row of a dataset, as TRL's DPO or SFT trainer would have them before truncation.

    `parts` are `prompt`, `chosen` and `rejected` of pairs, or `text`, each `(n,)`. `sorted` are the rows sorted by
    their prompts or texts, and how many tokens each has in common with the one before it, both `(n,)`.
    """

    parts: dict[str, np.ndarray]
    sorted: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def are_pairs(self) -> bool:
        return "chosen" in self.parts

    def __len__(self) -> int:
        return len(next(iter(self.parts.values())))

    @property
    def sequences(self) -> np.ndarray:
        """Tokens of the sequences that a padded batch has of each row, `(n, 2)` or `(n, 1)`."""
        if not self.are_pairs:
            return self.parts["text"][:, None]
        return np.stack([self.parts["prompt"] + self.parts[side] for side in ("chosen", "rejected")], axis=1)

    def kept(self, max_length: int | None, truncation_mode: str = "keep_start") -> Lengths:
        """The rows that TRL trains on: those whose prompt alone fills `max_length` are left out."""
        if not self.are_pairs or max_length is None or truncation_mode != "keep_start":
            return self
        keep = self.parts["prompt"] < max_length
        kept = None if self.sorted is None else RowCosts(self.parts["prompt"], *self.sorted)[keep]
        parts = {name: part[keep] for name, part in self.parts.items()}
        return Lengths(parts, kept and (kept.order, kept.common))

    def costs(self, max_length: int | None, truncation_mode: str = "keep_start", sharing: bool = True) -> RowCosts:
        """Tokens that rows put through the decoder without padding, with common prefixes computed once or not."""
        begins = self.parts["prompt" if self.are_pairs else "text"]
        each, begins = truncated_tokens(self.sequences.T, begins, max_length, truncation_mode)
        if sharing and self.are_pairs:
            each = each - begins
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


def measure(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, progress: bool = False) -> Lengths:
    """
    Tokenize a dataset as TRL does, and keep its lengths and what its rows begin with in common.

    It holds preference pairs (`chosen` and `rejected`, with `prompt` or beginning with it), or texts (`text`,
    `messages`, or `prompt` and `completion`), plain or conversational; anything else is a `ValueError`.
    """
    if len(dataset) == 0:
        raise ValueError("The dataset is empty: check its split or filter.")
    columns = set(dataset.column_names)
    known = ({"text"}, {"messages"}, {"chosen", "rejected"}, {"prompt", "completion"})
    if not any(names <= columns for names in known):
        raise ValueError(
            f"The dataset has columns {sorted(columns)}. Pairs need `chosen` and `rejected`, texts need `text`, "
            "`messages`, or `prompt` and `completion`: rename its columns."
        )
    size = 1000
    batches = track(range(0, len(dataset), size), "Tokenizing", disable=not progress, transient=True)
    lengths: dict[str, list[int]] = {}
    begins: list[np.ndarray] = []
    for at in batches:
        for row in token_rows(list(checked_rows(dataset, at, at + size)), tokenizer):
            ids = {"text": row["input_ids"]} if "input_ids" in row else {n: row[f"{n}_ids"] for n in _PAIR}
            for name, part in ids.items():
                lengths.setdefault(name, []).append(len(part))
            begins.append(np.array(next(iter(ids.values())), dtype=np.uint32))
    return Lengths({name: np.array(part, dtype=np.int64) for name, part in lengths.items()}, prefix_order(begins))


def texts_of(dataset: Dataset) -> Iterator[str]:
    """All text of a dataset, plain or conversational, to train a tokenizer on."""
    names = [name for name in dataset.column_names if name in TEXT_COLUMNS]
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
    lengths: Lengths, batch_sizes: Sequence[int], *, max_length: int | None = None, seed: int = 0, **how: Any
) -> list[BatchTokens]:
    """Tokens of random batches, averaged; sizes that the dataset cannot fill are left out."""
    sequences = np.minimum(lengths.sequences, max_length or np.iinfo(np.int64).max)
    real = lengths.costs(max_length, sharing=False, **how).each
    costs = lengths.costs(max_length, **how)
    draw = np.random.default_rng(seed)
    found = []
    for size in (s for s in batch_sizes if s <= len(lengths)):
        whole = len(lengths) // size * size
        orders = np.stack([draw.permutation(len(lengths))[:whole] for _ in range(DRAWS)]).reshape(-1, size)
        padded = sequences[orders].max((1, 2)) * size * sequences.shape[1]
        distinct = costs.each[orders].sum(1).mean()
        if costs.common.any():
            distinct -= np.mean([costs[batch].common.sum() for batch in orders[:SHARED]])
        found.append(BatchTokens(size, padded.mean(), real[orders].sum(1).mean(), float(distinct)))
    return found


def truncated(lengths: Lengths, max_length: int | None, truncation_mode: str = "keep_start") -> dict[str, int]:
    """How many rows lose tokens to `max_length`, and how many TRL leaves out since only their prompt would be left."""
    kept = lengths.kept(max_length, truncation_mode)
    cut = 0 if max_length is None else int((kept.sequences > max_length).any(1).sum())
    return {"rows": len(lengths), "truncated": cut, "dropped": len(lengths) - len(kept)}


def waiting(
    costs: RowCosts, processes: int, *, batch_size: int = 8, accumulation: int = 4, budget: int | None = None,
    seed: int = 0,
) -> Waiting:  # fmt: skip
    """
    Simulate how long processes would wait for the one with the most tokens.

    Processes meet in every forward, as FSDP and ZeRO-3 have it. An optimizer step has `batch_size` x `accumulation`
    rows on each process; datasets with fewer are gone through several times. `budget` is `max_tokens_per_batch`, by
    default [`memory_of`] the fixed batches.
    """
    budget = budget or memory_of(costs, batch_size)
    rows = batch_size * accumulation * processes
    steps = min(32, max(2, 40_000 // rows))
    draw = np.random.default_rng(seed)
    epochs = [draw.permutation(len(costs)) for _ in range(-(-steps * rows // len(costs)))]
    order = np.concatenate(epochs)[: steps * rows].reshape(steps, rows)
    each = costs.each
    forwards = each[order].reshape(steps, accumulation, processes, batch_size).sum(3)
    tokens, fixed, split_up = forwards.sum(), processes * forwards.max(2).sum(), 0
    for step in order:
        own = text_costs(costs.each[step])
        loads: list[int] = []
        for part in balance(own, processes):
            of_part = own[part]
            for i, micro_batch in enumerate(split(of_part, budget)):
                loads += [0] * (i + 1 - len(loads))
                loads[i] = max(loads[i], of_part.total(micro_batch))
        split_up += processes * sum(loads)
    return Waiting(processes, float(tokens / fixed), float(tokens / split_up))


def memory_of(costs: RowCosts, batch_size: int, seed: int = 0) -> int:
    """The most tokens of a random batch, of a thousand: what a device has room for if it trains by fixed batches."""
    draw, each = np.random.default_rng(seed), costs.each
    return max(int(each[draw.integers(len(costs), size=batch_size)].sum()) for _ in range(1000))


def summary(lengths: Lengths) -> dict[str, dict[str, float]]:
    """Mean, median, 95th percentile and most tokens of each part, and of whole sequences."""
    parts = dict(lengths.parts)
    if lengths.are_pairs:
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


def token_rows(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """
    Rows as TRL's DPO or SFT trainer tokenizes them, before truncation.

    Of pairs `prompt_ids`, `chosen_ids` and `rejected_ids`; of texts `input_ids`, and `prompt`, how many of them are a
    prompt that is not trained on.
    """
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
    names = ["prompt", "completion"] if "prompt" in rows[0] else ["text" if "text" in rows[0] else "messages"]
    whole = _token_ids(rows, names, tokenizer)
    prompts = _token_ids(rows, ["prompt"], tokenizer) if "prompt" in rows[0] else [[]] * len(rows)
    return [{"input_ids": ids, "prompt": _common(p, ids)} for p, ids in zip(prompts, whole, strict=True)]


def _token_ids(rows: list[dict[str, Any]], names: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of what stands in the columns `names`, one after another, as TRL puts it before the model."""
    conversational, is_prompt, eos = is_conversational(rows[0]), names == ["prompt"], str(tokenizer.eos_token)
    texts: list[str] = []
    for row in rows:
        if not conversational:
            text = "".join(row[name] for name in names)
            texts.append(text if is_prompt or text.endswith(eos) else text + eos)
            continue
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        more = {"tools": tools, "add_generation_prompt": is_prompt, **row.get("chat_template_kwargs", {})}
        messages = [message for name in names for message in row[name]]
        texts.append(str(tokenizer.apply_chat_template(messages, tokenize=False, **more)))
    return tokenizer(texts, add_special_tokens=not conversational, verbose=False)["input_ids"]  # type: ignore[return-value]


def _common(ids: list[int], others: list[int]) -> int:
    return len(ids) if others[: len(ids)] == ids else common_prefix_length(ids, others)
