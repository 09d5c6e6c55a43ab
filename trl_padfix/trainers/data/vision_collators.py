"""TRL's collators for images and text with a choice of padding side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.sft_trainer as trl_sft

from .batch_labels import PREFIXES
from .collators import SidedCollator, pad_left


__all__ = [
    "DataCollatorForVisionLanguageModeling", "DataCollatorForVisionPreference", "to_padding_side_with_kl",
]  # fmt: skip
_FOR_EACH_TOKEN = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "mm_token_type_ids")
"""Tensors of a batch with a value for each token, `(B, L)`."""


@dataclass
class DataCollatorForVisionPreference(SidedCollator, trl_dpo.DataCollatorForVisionPreference):
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

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        return self.to_padding_side(dict(super().torch_call(examples)))


@dataclass
class DataCollatorForVisionLanguageModeling(SidedCollator, trl_sft.DataCollatorForVisionLanguageModeling):
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

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = dict(super().torch_call(examples))
        return pad_left(batch) if self.padding_side == "left" else batch


def to_padding_side_with_kl(collator: SidedCollator, batch: dict[str, Any]) -> dict[str, Any]:
    """Pad a batch of unpaired preferences, and the mismatched completions of its KL term, on the collator's side."""
    for prefix in PREFIXES:
        # Rolling takes every tensor of the mask's shape. Both batches may have one shape, so each is rolled alone.
        names = [prefix + name for name in _FOR_EACH_TOKEN if prefix + name in batch]
        if names:
            moved = collator.without_empty_rows({name.removeprefix(prefix): batch[name] for name in names})
            moved = collator.to_padding_side(moved)
            batch |= {prefix + name: value for name, value in moved.items()}
    return batch
