"""TRL's collators with a choice of padding side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.reward_trainer as trl_reward
import trl.trainer.sft_trainer as trl_sft

from .batch_rows import PREFIXES


__all__ = [
    "DataCollatorForLanguageModeling", "DataCollatorForPreference", "DataCollatorForReward",
    "DataCollatorForVisionLanguageModeling", "DataCollatorForVisionPreference",
    "UnpairedMixin", "pad_left", "pad_right",
]  # fmt: skip
_FOR_EACH_TOKEN = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "mm_token_type_ids")
"""Tensors of a batch with a value for each token, `(B, L)`."""


def check_padding_side(padding_side: str | None, optional: bool = False) -> None:
    """Raise a `ValueError` for an invalid `padding_side`; if it is `optional`, `None` stands for the tokenizer's."""
    if padding_side not in ("left", "right") and not (optional and padding_side is None):
        sides = "'left', 'right' or None (the tokenizer's own)" if optional else "'left' or 'right'"
        raise ValueError(f"`padding_side` must be {sides}, got {padding_side!r}.")


@dataclass
class SidedCollator:
    """Padding side for TRL's collators: a mixin, in front of TRL's class."""

    padding_side: str = "right"
    packed_rows: bool = False

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side)

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
        """
        A right-padded batch, padded on `padding_side` instead.

        It stays as it is if a row begins with a completion token: left padding would score that token from padding.
        """
        if self.padding_side == "right":
            return batch
        moved = pad_left(batch)
        if "completion_mask" not in batch:
            return moved
        # A row that fills the batch (`first == 0`) has nothing before its first token, as with right padding.
        first = moved["attention_mask"].argmax(1)
        begins_with_completion = moved["completion_mask"].gather(1, first[:, None]).squeeze(1) == 1
        return batch if (begins_with_completion & (first > 0)).any() else moved


class BatchMixin(SidedCollator):
    """The padding side of a batch with one mask; a mixin, in front of TRL's class."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return self.to_padding_side(self.without_empty_rows(dict(super().torch_call(examples))))  # type: ignore[misc]


class UnpairedMixin(SidedCollator):
    """The padding side of completions, and of the mismatched completions of KTO's KL term; a mixin."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = dict(super().torch_call(examples))  # type: ignore[misc]
        for prefix in PREFIXES:
            # Rolling takes every tensor of the mask's shape. Both batches may have one shape, so each is rolled alone.
            if names := [prefix + name for name in _FOR_EACH_TOKEN if prefix + name in batch]:
                moved = self.without_empty_rows({name.removeprefix(prefix): batch[name] for name in names})
                batch |= {prefix + name: value for name, value in self.to_padding_side(moved).items()}
        return batch


@dataclass
class DataCollatorForPreference(BatchMixin, trl_dpo.DataCollatorForPreference):
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
            `"left"` or `"right"`. A batch with a row that has no prompt token is always padded right, because left
            padding would score the first token of that row from padding.

    Raises:
        ValueError: For an invalid `padding_side`.

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
class DataCollatorForReward(BatchMixin, trl_reward.DataCollatorForPreference):
    """
    TRL's collator for pairs of whole sequences, as a reward model scores them, padding on the side you choose.

    Collates `N` pairs to `input_ids` and `attention_mask`, each a `torch.Tensor` of shape `(2 * N, L)`: first the
    chosen sequences, then the rejected ones.

    Args:
        pad_token_id, pad_to_multiple_of, padding_side:
            As in [`DataCollatorForPreference`].

    Raises:
        ValueError: For an invalid `padding_side`.

    Example:

    ```python
    >>> from trl_padfix import DataCollatorForReward

    >>> collator = DataCollatorForReward(pad_token_id=0, padding_side="left")
    >>> collator([{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}])["input_ids"]
    tensor([[1, 2, 3],
            [0, 1, 4]])

    ```
    """


@dataclass
class DataCollatorForLanguageModeling(SidedCollator, trl_sft.DataCollatorForLanguageModeling):
    """
    TRL's collator for language modeling, padding on the side you choose.

    Collates `B` rows to `input_ids`, `attention_mask` and `labels`, each a `torch.Tensor` of shape `(B, L)`.

    No token precedes the first token of a left-padded row. Its label stands in column 0, which no loss scores, so that
    a batch has as many labels on both sides.

    Args:
        pad_token_id, pad_to_multiple_of, padding_side:
            As in [`DataCollatorForPreference`].
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to concatenate all rows to one row, with position ids and no mask.
        packed_rows (`bool`, *optional*, defaults to `False`):
            Whether rows with `seq_lengths` are packed, and are concatenated even with `padding_free=False`: their
            positions then separate the sequences. Trainers set it for `eval_packing`.
        **kwargs:
            The other fields of TRL's collator.

    Raises:
        ValueError: For an invalid `padding_side`.

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
            [   4, -100,    5]])

    ```
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        if self.packed_rows and "seq_lengths" in examples[0] and not self.padding_free:
            return replace(self, padding_free=True).torch_call(examples)
        batch = super().torch_call(examples)
        if self.padding_free:
            return batch
        return self.to_padding_side(self.without_empty_rows(batch))


@dataclass
class DataCollatorForVisionPreference(BatchMixin, trl_dpo.DataCollatorForVisionPreference):
    """
    TRL's collator for preference pairs with images, padding on the side you choose.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Tokenizes the text and prepares the images.
        max_length (`int`, *optional*):
            Maximum length of a sequence; the end of longer ones is cut off.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`, for ids, masks and token types.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For an invalid `padding_side`.

    Example:

    ```python
    from transformers import AutoProcessor
    from trl_padfix import DataCollatorForVisionPreference

    processor = AutoProcessor.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")
    collator = DataCollatorForVisionPreference(processor, padding_side="left")
    batch = collator([
        {
            "images": [image],
            "prompt": [{"role": "user", "content": "What is it?"}],
            "chosen": [{"role": "assistant", "content": "A cat."}],
            "rejected": [{"role": "assistant", "content": "A dog, I think."}],
        }
    ])
    batch["attention_mask"][:, 0]  # tensor([0, 1])
    ```
    """


@dataclass
class DataCollatorForVisionLanguageModeling(BatchMixin, trl_sft.DataCollatorForVisionLanguageModeling):
    """
    TRL's collator for language modeling with images, padding on the side you choose.

    Collates `B` examples to `input_ids`, `attention_mask` and `labels`, each of shape `(B, L)`, and the processor's
    tensors of their images. Labels of first tokens are as in [`DataCollatorForLanguageModeling`].

    Args:
        processor, max_length, padding_side:
            As in [`DataCollatorForVisionPreference`].
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For an invalid `padding_side`.

    Example:

    ```python
    from transformers import AutoProcessor
    from trl_padfix import DataCollatorForVisionLanguageModeling

    processor = AutoProcessor.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")
    collator = DataCollatorForVisionLanguageModeling(processor, padding_side="left")
    rows = [{"images": [], "messages": [{"role": "user", "content": text}]} for text in ("What is it?", "It")]
    collator(rows)["attention_mask"][:, 0]  # tensor([1, 0])
    ```
    """


def pad_left(batch: dict[str, Any]) -> dict[str, Any]:
    """
    Move the padding of right-padded `(B, L)` tensors to the left.

    The label of the first token of a row moves to column 0, which no loss scores: only padding would predict it.
    transformers counts it in some models, as it does with right padding.
    """
    mask = batch["attention_mask"]
    return _with_swapped_labels(_rolled(batch, mask.shape[1] - mask.sum(1, keepdim=True)))


def pad_right(batch: dict[str, Any]) -> dict[str, Any]:
    """Move the padding of left-padded `(B, L)` tensors to the right: the inverse of [`pad_left`]."""
    return _rolled(_with_swapped_labels(batch), -batch["attention_mask"].argmax(1, keepdim=True))


def _with_swapped_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """A left-padded batch in which the labels of each first token and of column 0, if there are any, are swapped."""
    if "labels" not in batch:
        return batch
    labels, first = batch["labels"].clone(), batch["attention_mask"].argmax(1)
    rows = torch.arange(len(labels), device=labels.device)
    labels[rows, 0], labels[rows, first] = batch["labels"][rows, first], batch["labels"][rows, 0]
    return {**batch, "labels": labels}


def _rolled(batch: dict[str, Any], by: torch.Tensor) -> dict[str, Any]:
    """Roll each row of the `(B, L)` tensors of a batch to the right, by a number of columns per row, `(B, 1)`."""
    shape = batch["attention_mask"].shape
    column = (torch.arange(shape[1], device=by.device) - by) % shape[1]
    of_tokens = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.shape == shape}
    return batch | {k: v.gather(1, column) for k, v in of_tokens.items()}
