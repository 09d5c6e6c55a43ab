"""Collators of TRL that honour the padding side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.reward_trainer as trl_reward
import trl.trainer.sft_trainer as trl_sft


__all__ = ["DataCollatorForLanguageModeling", "DataCollatorForPreference", "DataCollatorForReward"]


def check_padding_side(padding_side: str | None, optional: bool = False) -> None:
    """
    Raises:
        ValueError: If `padding_side` is neither `"left"` nor `"right"`, nor, where it is `optional`, `None`.
    """
    if padding_side not in ("left", "right") and not (optional and padding_side is None):
        sides = "'left', 'right' or None (the tokenizer's own)" if optional else "'left' or 'right'"
        raise ValueError(f"`padding_side` must be {sides}, got {padding_side!r}.")


def check_pair(example: dict[str, Any], where: str) -> None:
    """
    Raises:
        ValueError: If a completion of a tokenized pair is empty.
    """
    for side in ("chosen", "rejected"):
        if len(example[f"{side}_ids"]) == 0:
            raise ValueError(
                f"The {side} completion of {where} has no token: its log-probability would be 0 whatever the model "
                "does, and the pair would teach nothing true. Drop the pair, or end completions with an EOS token."
            )


@dataclass
class DataCollatorForPreference(trl_dpo.DataCollatorForPreference):
    """
    TRL's collator for preference pairs, padding on the side you choose.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        max_length (`int`, *optional*):
            Longest sequence; longer ones are truncated before padding.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            `"keep_start"` or `"keep_end"`.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`.

    Raises:
        ValueError: For another `padding_side`, for a pair with an empty completion, and for a left-padded row that has
            no prompt token left (its first token would be scored from padding).

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

    padding_side: str = "right"

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        for i, example in enumerate(examples):
            check_pair(example, f"pair {i} of the batch")
        batch = super().torch_call(examples)
        if self.padding_side == "left":
            batch = pad_left(batch)
            check_prompts(batch, "every pair", " truncate with `truncation_mode='keep_start'`,")
        return batch


@dataclass
class DataCollatorForReward(trl_reward.DataCollatorForPreference):
    """
    TRL's collator for pairs of whole sequences, as a reward model scores them, padding on the side you choose.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`.

    Raises:
        ValueError: For another `padding_side`, and for a pair with an empty sequence.

    Example:

    ```python
    >>> from trl_padfix import DataCollatorForReward

    >>> collator = DataCollatorForReward(pad_token_id=0, padding_side="left")
    >>> collator([{"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}])["input_ids"]
    tensor([[1, 2, 3],
            [0, 1, 4]])

    ```
    """

    padding_side: str = "right"

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        for i, example in enumerate(examples):
            for side in ("chosen", "rejected"):
                if len(example[f"{side}_ids"]) == 0:
                    raise ValueError(
                        f"The {side} sequence of pair {i} of the batch has no token, so there is nothing to take a "
                        "reward from. Drop the pair."
                    )
        batch = super().torch_call(examples)
        return pad_left(batch) if self.padding_side == "left" else batch


@dataclass
class DataCollatorForLanguageModeling(trl_sft.DataCollatorForLanguageModeling):
    """
    TRL's collator for language modelling, padding on the side you choose.

    The first token of a left-padded row has no label: there is nothing to predict it from. Rows that were packed
    (`seq_lengths`) are laid behind one another in one row whether or not `padding_free` says so, so that their
    sequences stay apart.

    Args:
        pad_token_id (`int`):
            Token ID to pad with.
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to lay all rows behind one another in one row, with positions and no mask.
        pad_to_multiple_of (`int`, *optional*):
            Pad the length of the batch to a multiple of this.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For another `padding_side`, and for an empty row.

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

    padding_side: str = "right"

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        for i, example in enumerate(examples):
            if len(example["input_ids"]) == 0:
                raise ValueError(f"Row {i} of the batch has no token, so there is nothing to train on. Drop it.")
        if "seq_lengths" in examples[0] and not self.padding_free:
            return replace(self, padding_free=True).torch_call(examples)
        batch = super().torch_call(examples)
        if self.padding_side == "left" and not self.padding_free:
            return pad_left(batch)
        return batch


def check_prompts(batch: dict[str, Any], every: str, remedy: str) -> None:
    """Refuse left-padded rows whose first real token is scored."""
    first = batch["attention_mask"].argmax(1)
    unseen = (batch["completion_mask"].gather(1, first[:, None]).squeeze(1) == 1) & (first > 0)
    if unseen.any():
        raise ValueError(
            f"Rows {unseen.nonzero().flatten().tolist()} of the batch begin with a completion token: no prompt token "
            f"is left to predict it from, and left padding would score it from padding. Give {every} a prompt (a BOS "
            f"token is enough),{remedy} or pad right."
        )


def pad_left(batch: dict[str, Any]) -> dict[str, Any]:
    """Move the padding of right-padded `(B, L)` tensors to the left; a row's first token loses its label, if any."""
    mask = batch["attention_mask"]
    column = torch.arange(mask.shape[1]) - (mask.shape[1] - mask.sum(1, keepdim=True))
    column = column % mask.shape[1]
    batch = {k: v.gather(1, column) if v.shape == mask.shape else v for k, v in batch.items()}
    if "labels" in batch:  # there is nothing to predict it from
        batch["labels"][:, 1:].masked_fill_(batch["attention_mask"].diff(dim=1) == 1, -100)
    return batch
