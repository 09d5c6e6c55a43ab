"""TRL's collators with a choice of padding side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.reward_trainer as trl_reward
import trl.trainer.sft_trainer as trl_sft
from datasets import Dataset

from .columns import empty_lists
from .data_warnings import count_and_warn, name_rows, warn_or_raise


__all__ = ["DataCollatorForLanguageModeling", "DataCollatorForPreference", "DataCollatorForReward"]

EMPTY = "completions have no token; their log-probability is always 0. Drop them, or end completions with an EOS token"
"""Text of the warning about empty completions in a trainer."""


def check_padding_side(padding_side: str | None, optional: bool = False) -> None:
    """Raise a `ValueError` for an invalid `padding_side`; if it is `optional`, `None` stands for the tokenizer's."""
    if padding_side not in ("left", "right") and not (optional and padding_side is None):
        sides = "'left', 'right' or None (the tokenizer's own)" if optional else "'left' or 'right'"
        raise ValueError(f"`padding_side` must be {sides}, got {padding_side!r}.")


@dataclass
class SidedCollator:
    """
    Padding side and row checks for TRL's collators; a mixin, in front of TRL's class.

    A collator used by itself raises an error for invalid rows, which cannot be scored. A trainer checks its
    dataset before the first step and does not stop for an invalid row of a stream. With `for_trainer` these rows are
    counted in `odd_rows`, warned about, and weighted as in TRL's trainer, unless it is `strict`.
    """

    padding_side: str = "right"
    for_trainer: bool = False
    strict: bool = False
    packed_rows: bool = False
    odd_rows: Counter[str] = field(default_factory=Counter, init=False, repr=False, compare=False)

    texts: ClassVar[dict[str, str]] = {"chosen_ids": "chosen completion", "rejected_ids": "rejected completion"}
    """Columns of an example that must not be empty, with their names in messages."""
    example: ClassVar[str] = "pair"
    """Name of an example in messages."""

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side)

    def raise_or_count(self, count: int, error: str, treatment: str, example: str = "") -> None:
        """Raise a `ValueError` with the text `error` about `count` rows; in a trainer count them and warn instead."""
        if self.strict or not self.for_trainer:
            raise ValueError(error)
        count_and_warn(self.odd_rows, treatment, count, example)

    def refuse_empty(self, examples: list[dict[str, Any]], treatment: str = EMPTY) -> None:
        """[`raise_or_count`] for examples with an empty text."""
        for column in self.texts:
            rows = [i for i, example in enumerate(examples) if len(example[column]) == 0]
            if rows:
                self.raise_or_count(len(rows), self._no_token(column, rows[0], "the batch"), treatment)

    @classmethod
    def check_empty_in(cls, dataset: Dataset, name: str, strict: bool) -> None:
        """Warn about texts of the tokenized dataset `name` without a token, or raise a `ValueError` with `strict`."""
        for column in cls.texts:
            rows = empty_lists(dataset, column).tolist()
            if rows:
                count = f" {name_rows(rows, cls.example)}." if len(rows) > 1 else ""
                warn_or_raise(cls._no_token(column, rows[0], f"the {name} dataset") + count, strict)

    @classmethod
    def _no_token(cls, column: str, row: int, where: str) -> str:
        return (
            f"The {cls.texts[column]} of {cls.example} {row} of {where} has no token, so there is nothing to score. "
            f"Drop the {cls.example}, or end completions with an EOS token."
        )

    def without_empty_rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A right-padded batch whose empty rows attend to one pad token, which has no label."""
        empty = batch["attention_mask"].sum(1) == 0
        if not empty.any():
            return batch
        if batch["attention_mask"].shape[1] == 0:  # all rows are empty: give them a column
            values = {"input_ids": self.pad_token_id, "labels": -100}  # type: ignore[attr-defined]
            batch = {k: v.new_full((len(v), 1), values.get(k, 0)) if v.dim() == 2 else v for k, v in batch.items()}
        # `torch.tensor([])` is float32, and padding takes the dtype of the first row.
        batch = {k: v.long() if k in ("input_ids", "attention_mask", "labels") else v for k, v in batch.items()}
        batch["attention_mask"][empty, 0] = 1
        return batch

    def to_padding_side(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A right-padded batch of prompts and completions, padded on `padding_side` instead."""
        if self.padding_side == "right":
            return batch
        moved = pad_left(batch)
        # A row that fills the batch (`first == 0`) has nothing before its first token, as with right padding.
        first = moved["attention_mask"].argmax(1)
        begins_with_completion = moved["completion_mask"].gather(1, first[:, None]).squeeze(1) == 1
        rows = (begins_with_completion & (first > 0)).nonzero().flatten().tolist()
        if not rows:
            return moved
        self.raise_or_count(
            len(rows),
            f"Rows {rows} of the batch begin with a completion token: no prompt token is left to predict it from, and "
            "left padding would score it from padding. Give every row a prompt (a BOS token is enough), truncate with "
            "`truncation_mode='keep_start'`, or pad right.",
            "rows begin with a completion token, which nothing predicts. Their batches are padded right: TRL then "
            "does not score it. Give every row a prompt (a BOS token is enough)",
        )
        return batch


class CompletionMixin(SidedCollator):
    """Checks and the padding side of prompts with completions; a mixin, in front of TRL's class."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        self.refuse_empty(examples)
        return self.to_padding_side(self.without_empty_rows(super().torch_call(examples)))  # type: ignore[misc]


@dataclass
class DataCollatorForPreference(CompletionMixin, trl_dpo.DataCollatorForPreference):
    """
    TRL's collator for preference pairs, padding on the side you choose.

    Collates `N` pairs to `input_ids`, `attention_mask` and `completion_mask`, each a `torch.Tensor` of shape
    `(2 * N, L)`: first the chosen sequences, then the rejected ones.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        max_length (`int`, *optional*):
            Maximum length of a sequence; longer ones are truncated before padding.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            `"keep_start"` or `"keep_end"`.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`.
        for_trainer (`bool`, *optional*, defaults to `False`):
            Whether invalid rows are counted in `odd_rows` and warned about, instead of being errors. Trainers set it,
            because they have checked their data before the first step.

    Raises:
        ValueError: For an invalid `padding_side`, for a pair with an empty completion, and for a left-padded row
            without a prompt token (its first token would be scored from padding).

    Example:

    ```python
    >>> from trl_padfix import DataCollatorForPreference

    >>> collator = DataCollatorForPreference(pad_token_id=0, padding_side="left")
    >>> batch = collator([{"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [5]}])
    >>> batch["input_ids"]
    tensor([[1, 2, 3, 4],
            [0, 1, 2, 5]])
    >>> batch["completion_mask"]
    tensor([[0, 0, 1, 1],
            [0, 0, 0, 1]])

    ```
    """


@dataclass
class DataCollatorForReward(SidedCollator, trl_reward.DataCollatorForPreference):
    """
    TRL's collator for pairs of whole sequences, as a reward model scores them, padding on the side you choose.

    Collates `N` pairs to `input_ids` and `attention_mask`, each a `torch.Tensor` of shape `(2 * N, L)`: first the
    chosen sequences, then the rejected ones.

    Args:
        pad_token_id, pad_to_multiple_of, padding_side, for_trainer:
            As in [`DataCollatorForPreference`].

    Raises:
        ValueError: For an invalid `padding_side`, and for a pair with an empty sequence.

    Example:

    ```python
    >>> from trl_padfix import DataCollatorForReward

    >>> collator = DataCollatorForReward(pad_token_id=0, padding_side="left")
    >>> collator([{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}])["input_ids"]
    tensor([[1, 2, 3],
            [0, 1, 4]])

    ```
    """

    texts = {"chosen_ids": "chosen sequence", "rejected_ids": "rejected sequence"}

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        self.refuse_empty(examples, "sequences have no token; they are scored as one pad token")
        batch = self.without_empty_rows(super().torch_call(examples))
        return pad_left(batch) if self.padding_side == "left" else batch


@dataclass
class DataCollatorForLanguageModeling(SidedCollator, trl_sft.DataCollatorForLanguageModeling):
    """
    TRL's collator for language modeling, padding on the side you choose.

    Collates `B` rows to `input_ids`, `attention_mask` and `labels`, each a `torch.Tensor` of shape `(B, L)`.

    The first token of a left-padded row has no label, because no token precedes it.

    Args:
        pad_token_id, pad_to_multiple_of, padding_side:
            As in [`DataCollatorForPreference`].
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to concatenate all rows to one row, with position ids and no mask.
        for_trainer (`bool`, *optional*, defaults to `False`):
            As in [`DataCollatorForPreference`]. Labels of first tokens then stand in column 0, where no loss scores
            them: transformers counts them in some models.
        packed_rows (`bool`, *optional*, defaults to `False`):
            Whether rows with `seq_lengths` are packed, and are concatenated even with `padding_free=False`: their
            positions then separate the sequences. Trainers set it for `eval_packing`.
        **kwargs:
            The other fields of TRL's collator.

    Raises:
        ValueError: For an invalid `padding_side`, and for an empty row.

    Example:

    ```python
    >>> from trl_padfix import DataCollatorForLanguageModeling

    >>> collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_side="left")
    >>> batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    >>> batch["input_ids"]
    tensor([[1, 2, 3],
            [0, 4, 5]])
    >>> batch["labels"]
    tensor([[   1,    2,    3],
            [-100, -100,    5]])

    ```
    """

    texts, example = {"input_ids": "text"}, "row"

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        self.refuse_empty(examples, "rows have no token; they teach nothing. Drop them")
        if self.packed_rows and "seq_lengths" in examples[0] and not self.padding_free:
            return replace(self, padding_free=True).torch_call(examples)
        batch = super().torch_call(examples)
        if self.padding_free:
            return batch
        batch = self.without_empty_rows(batch)
        return pad_left(batch, keep_first_labels=self.for_trainer) if self.padding_side == "left" else batch


def pad_left(batch: dict[str, Any], keep_first_labels: bool = False) -> dict[str, Any]:
    """
    Move the padding of right-padded `(B, L)` tensors to the left.

    The first token of a row loses its label, since only padding would predict it. With `keep_first_labels` the label
    is put into column 0, which no loss scores: transformers counts it in some models, as it does with right padding.
    """
    mask = batch["attention_mask"]
    batch = _rolled(batch, mask.shape[1] - mask.sum(1, keepdim=True))
    return _with_swapped_labels(batch, keep_first_labels) if "labels" in batch else batch


def pad_right(batch: dict[str, Any]) -> dict[str, Any]:
    """Move the padding of left-padded `(B, L)` tensors to the right: the inverse of [`pad_left`]."""
    batch = _with_swapped_labels(batch, True) if "labels" in batch else batch
    return _rolled(batch, -batch["attention_mask"].argmax(1, keepdim=True))


def _with_swapped_labels(batch: dict[str, Any], swap: bool) -> dict[str, Any]:
    """A left-padded batch in which the labels of each first token and of column 0 are swapped, or both -100."""
    labels, first = batch["labels"].clone(), batch["attention_mask"].argmax(1)
    rows = (first > 0).nonzero().flatten()
    columns = first[rows]
    in_column_0, of_first_tokens = labels[rows, 0], labels[rows, columns]
    labels[rows, columns] = in_column_0 if swap else -100
    labels[rows, 0] = of_first_tokens if swap else -100
    return {**batch, "labels": labels}


def _rolled(batch: dict[str, Any], by: torch.Tensor) -> dict[str, Any]:
    """Roll each row of the `(B, L)` tensors of a batch to the right, by a number of columns per row, `(B, 1)`."""
    shape = batch["attention_mask"].shape
    column = (torch.arange(shape[1], device=by.device) - by) % shape[1]
    of_tokens = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.shape == shape}
    return batch | {k: v.gather(1, column) for k, v in of_tokens.items()}
