"""
Token counts of a dataset before any training: padding, shared prefixes, truncation. Which settings pay, and why.

Rows are tokenized as TRL's trainers do. Their lengths are kept, and the length of the prefix that each row shares with
its neighbor in sorted order. All figures follow from these.

Tokens are counted in random batches, in batches of rows with long shared prefixes, and in batches by TRL's settings.
Their ratio limits the speedup where time is proportional to tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice

import numpy as np
import torch
from datasets import Dataset
from rich.progress import track
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl import is_conversational

from ..core.layout.layout import GATHERED_KEYS_PER_TOKEN
from ..trainers.batching.bin_packing import RowCosts, prefix_costs, sort_by_prefix, text_costs, truncated_tokens
from ..trainers.batching.row_order import group_rows
from .data import TokenRow, token_rows


__all__ = ["UNITS", "BatchTokens", "Lengths", "Verdict", "advise", "batch_tokens", "measure"]

DRAWS = 8
"""Epochs of random batches that token counts are averaged over."""

SORTED_BATCHES = 512
"""Batches that are sorted, to count the prefixes that different rows of a batch share."""


WORTH_GROUPING = 0.9
"""Grouping is advised if grouped batches have less than this share of the tokens of random ones."""

WORTH_SHARING = 0.97
"""Sharing is advised if batches have less than this share of their real tokens with it."""

UNITS = {"dpo": "pairs", "sft": "rows", "kto": "rows"}
"""Units in which the batches of a trainer are counted."""


@dataclass(frozen=True, eq=False)
class Lengths:
    """
    Tokens of every row of a dataset.

    Attributes:
        columns (`dict[str, np.ndarray]`):
            Tokens of a `text`, or of a `prompt` and the columns that follow it (`chosen` and `rejected`, or
            `completion`), each of shape `(n,)`, before truncation.
        by_prefix (`tuple[np.ndarray, np.ndarray]`):
            Rows sorted by their first sequences, and the number of tokens that each shares with the one before it,
            both `(n,)`: the result of [`~trl_padfix.trainers.batching.bin_packing.sort_by_prefix`].
        untrained (`np.ndarray`):
            Tokens at the beginning of each row that are not trained on, `(n,)`: its prompt.
        max_length (`int`, *optional*):
            Truncation that applies to these rows, see [`Lengths.truncated`].
    """

    columns: dict[str, np.ndarray]
    by_prefix: tuple[np.ndarray, np.ndarray]
    untrained: np.ndarray
    max_length: int | None = None

    @classmethod
    def of(cls, rows: Iterable[TokenRow]) -> Lengths:
        """Lengths of the rows of [`token_rows`], whose ids are dropped one by one."""
        lengths: dict[str, list[int]] = {}
        first: list[np.ndarray] = []
        untrained: list[int] = []
        for row in rows:
            untrained.append(row["prompt"] if "prompt" in row else len(row.get("prompt_ids", [])))
            ids = {n.removesuffix("_ids").replace("input", "text"): v for n, v in row.items() if n.endswith("_ids")}
            for name, tokens in ids.items():
                lengths.setdefault(name, []).append(len(tokens))
            sequence = chain(*islice(ids.values(), 2))  # a text, or a prompt and its first completion
            first.append(np.fromiter(sequence, dtype=np.uint32))  # a quarter of a list of integers
        columns = {name: np.array(tokens, dtype=np.int64) for name, tokens in lengths.items()}
        return cls(columns, sort_by_prefix(first), np.array(untrained, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> np.ndarray:
        """Tokens of the prompts, or of the texts, `(n,)`."""
        return next(iter(self.columns.values()))

    @property
    def sequences(self) -> np.ndarray:
        """Tokens of each row's sequences in a padded batch, before truncation, `(n, k)`."""
        sides = np.column_stack([tokens for name, tokens in self.columns.items() if name != "prompt"])
        return sides + self.columns["prompt"][:, None] if "prompt" in self.columns else sides

    @property
    def kept_tokens(self) -> np.ndarray:
        """Tokens of [`Lengths.sequences`] after truncation, `(n, k)`."""
        return np.minimum(self.sequences, self.max_length or np.iinfo(np.int64).max)

    def truncated(self, max_length: int | None) -> Lengths:
        """The rows that TRL trains on with this truncation: it drops those whose prompt alone fills `max_length`."""
        limited = replace(self, max_length=max_length)
        if max_length is None:
            return limited
        keep = self.untrained < max_length
        # A subset of sorted rows shares with its neighbors the minimum over the dropped rows in between, which
        # `RowCosts` computes; its tokens do not matter here.
        costs = RowCosts(self.prompts, *self.by_prefix)[keep]
        columns = {name: tokens[keep] for name, tokens in self.columns.items()}
        return replace(limited, columns=columns, by_prefix=(costs.order, costs.shared), untrained=self.untrained[keep])

    def costs(self, sharing: bool = True) -> RowCosts:
        """Tokens of the rows in the decoder without padding; with `sharing`, shared prefixes are computed once."""
        sequences = self.sequences
        tokens, first = truncated_tokens(sequences.T, sequences[:, 0], self.max_length)
        if not sharing:
            return text_costs(tokens)
        # The k sequences of a row share its prompt, and the first one may share its beginning with other rows. Other
        # prefixes that the sequences share are not counted.
        tokens = tokens - (sequences.shape[1] - 1) * np.minimum(self.prompts, first)
        return prefix_costs(tokens, first, *self.by_prefix)


@dataclass(frozen=True)
class BatchTokens:
    """Mean tokens of batches of one size: with padding, without padding, and without repeated prefixes."""

    padded: float
    real: float
    distinct: float

    @property
    def auto(self) -> float:
        """Tokens with `prefix_sharing="auto"`, by the rule of `Layout.sharing_pays`: every row gathers its keys."""
        return self.distinct if (self.real - self.distinct) * GATHERED_KEYS_PER_TOKEN >= self.real else self.real


def measure(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Lengths:
    """
    Tokenize a dataset as TRL does, and keep its lengths and shared prefixes.

    Args:
        dataset (`Dataset`):
            Plain or conversational pairs, texts or answers.
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the model.
    """

    def tokenized() -> Iterator[TokenRow]:
        rows = track(dataset, "Tokenizing", len(dataset), transient=True)
        for _, alike in groupby(rows, is_conversational):  # after a chat, TRL also takes texts
            while chunk := [*islice(alike, 1000)]:  # rows of one call of the tokenizer
                yield from token_rows(chunk, tokenizer)

    return Lengths.of(tokenized())


def batch_tokens(lengths: Lengths, size: int, *, order: str = "random") -> BatchTokens:
    """
    Mean tokens of full batches of `size` rows.

    Args:
        lengths ([`Lengths`]):
            At least `size` rows.
        size (`int`):
            Rows of a batch.
        order (`str`, *optional*, defaults to `"random"`):
            How batches are formed: `"random"`, as in the `"file"`, by `"prefix"` as `group_by_prefix` does, or by
            `"length"` as transformers' `group_by_length` does.
    """
    costs, tokens = lengths.costs(), lengths.kept_tokens
    draw = np.random.default_rng(0)
    epochs = [draw.permutation(len(lengths)) for _ in range(DRAWS if order == "random" else 1)]
    if order == "file":
        epochs = [np.arange(len(lengths))]
    elif order == "prefix":
        epochs = [epoch[group_rows(costs[epoch], size)] for epoch in epochs]
    elif order == "length":
        generator = torch.Generator().manual_seed(0)
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
    return BatchTokens(float(padded.mean()), float(real.mean()), float(distinct))


@dataclass(frozen=True)
class Verdict:
    """Mean numbers of tokens of a batch, and the settings that follow from them."""

    batch_size: int
    trainer: str
    # KTO's are not random.
    random: BatchTokens  # TRL's batches; of its own `padding_free` or packing (SFT only) the `real` ones
    grouped: BatchTokens  # rows of long shared prefixes together
    by_length: BatchTokens  # rows of about one length together

    @property
    def shares(self) -> bool:
        """Whether `prefix_sharing` is advised."""
        return self.tokens < WORTH_SHARING * self.random.real

    @property
    def groups(self) -> bool:
        """Whether `group_by_prefix` is advised."""
        return self.grouped.auto < WORTH_GROUPING * self.random.auto

    @property
    def tokens(self) -> float:
        """Tokens of a batch with the advised settings."""
        return self.grouped.auto if self.groups else self.random.auto

    def lines(self) -> list[str]:
        """The verdict in words."""
        padded, real = self.random.padded, self.random.real
        repeated, grouped = ((real - min(tokens.auto, real)) / padded for tokens in (self.random, self.grouped))
        settings = ["padding_free=True", 'prefix_sharing="auto"' if self.shares else "prefix_sharing=False"]
        settings += ["group_by_prefix=True"] * self.groups
        single = "One row has no padding. Set a larger batch instead of accumulating, and count it again."
        own = f"{padded / self.by_length.padded:.1f}x, {padded / real:.1f}x and {padded / real:.1f}x by tokens"
        return [
            f"Use {', '.join(settings)}.",
            f"TRL's batch of {self.batch_size} {UNITS[self.trainer]} has {padded:,.0f} tokens: "
            f"{1 - real / padded:.0%} are padding, and {repeated:.0%} repeat a prefix (with group_by_prefix: "
            f"{grouped:.0%}).",
            f"Expected speedup: {padded / self.tokens:.1f}x ({padded:,.0f} / {self.tokens:,.0f} tokens).",
            "TRL's group_by_length, padding_free and packing: "
            f"{own if self.trainer == 'sft' else 'none for this trainer'}.",
            *[single] * (self.batch_size == 1 and padded == real),
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
    order = "file" if trainer == "kto" else "random"  # TRL's KTO reads rows in the order of the file
    return Verdict(size, trainer, *(batch_tokens(lengths, size, order=o) for o in (order, "prefix", "length")))
