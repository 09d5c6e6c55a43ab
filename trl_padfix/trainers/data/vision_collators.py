"""TRL's collators for images and text with a choice of padding side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.sft_trainer as trl_sft

from .batch_labels import PREFIXES
from .collators import SidedCollator, pad_left


__all__ = [
    "DataCollatorForVisionLanguageModeling", "DataCollatorForVisionPreference", "VisionCollator", "count_placeholders",
    "misplaced_message", "to_padding_side_with_kl",
]  # fmt: skip
_FOR_EACH_TOKEN = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "mm_token_type_ids")
"""Tensors of a batch with a value for each token, `(B, L)`."""


@dataclass
class VisionCollator(SidedCollator):
    """Checks images of a batch; a mixin, in front of TRL's class."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        examples = copied(examples)
        for row, example in enumerate(examples):
            images = len(example["images"])
            placeholders = count_placeholders(example, images, self.processor)  # type: ignore[attr-defined]
            if placeholders != images:
                treatment = "rows have more or fewer images than placeholders; the model gets them unchanged"
                self.raise_or_count(1, misplaced_message(row, images, placeholders, "the batch"), treatment)
        return dict(super().torch_call(examples))  # type: ignore[misc]

    def refuse_cut(self, batch: dict[str, Any], count: int, what: str) -> None:
        """[`SidedCollator.raise_or_count`] for examples (of `count`) that have an empty completion."""
        # Modulo, since row `count + i` is the rejected completion of example `i`.
        rows = sorted({i % count for i in (batch["completion_mask"].sum(1) == 0).nonzero().flatten().tolist()})
        if not rows:
            return
        within = f"a completion without a token (within `max_length={self.max_length}`)"  # type: ignore[attr-defined]
        why = "log-probability would always be 0. Drop them, or raise `max_length`"
        error = f"{what.capitalize()} {rows} of the batch have {within}: its {why}."
        self.raise_or_count(len(rows), error, f"{what} have {within}, whose {why}")


@dataclass
class DataCollatorForVisionPreference(VisionCollator, trl_dpo.DataCollatorForVisionPreference):
    """
    TRL's collator for preference pairs with images, padding on the side you choose.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Tokenizes the text and prepares the images.
        max_length (`int`, *optional*):
            Maximum length of a sequence; the end of longer ones is cut off.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`, for ids, masks and token types.
        for_trainer (`bool`, *optional*, defaults to `False`):
            Whether invalid rows are counted in `odd_rows` and warned about, instead of being errors. Trainers set it,
            because they have checked their data before the first step.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For an invalid `padding_side`, and for a pair with more or fewer images than placeholders, or with
            a completion that has no token (left).

    Example:

    ```python
    >>> from PIL import Image
    >>> from trl_padfix import DataCollatorForVisionPreference
    >>> from trl_padfix.tools.tiny import build_llava, train_tokenizer

    >>> _, processor = build_llava(train_tokenizer(["What is it? A cat. A dog, I think."] * 2, vocab_size=400))
    >>> collator = DataCollatorForVisionPreference(processor, padding_side="left")
    >>> image = Image.new("RGB", (32, 32))
    >>> batch = collator([
    ...     {
    ...         "images": [image],
    ...         "prompt": [{"role": "user", "content": "What is it?"}],
    ...         "chosen": [{"role": "assistant", "content": "A cat."}],
    ...         "rejected": [{"role": "assistant", "content": "A dog, I think."}],
    ...     }
    ... ])
    >>> batch["attention_mask"][:, 0]
    tensor([0, 1])
    >>> batch["pixel_values"].shape
    torch.Size([2, 3, 32, 32])

    ```
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        self.refuse_cut(batch, len(examples), "pairs")
        return self.to_padding_side(batch)


@dataclass
class DataCollatorForVisionLanguageModeling(VisionCollator, trl_sft.DataCollatorForVisionLanguageModeling):
    """
    TRL's collator for language modeling with images, padding on the side you choose.

    Collates `B` examples to `input_ids`, `attention_mask` and `labels`, each of shape `(B, L)`, and the processor's
    tensors of their images. The first token of a left-padded row has no label, because no token precedes it.

    Args:
        processor, max_length, padding_side:
            As in [`DataCollatorForVisionPreference`].
        for_trainer (`bool`, *optional*, defaults to `False`):
            As there. Labels of first tokens then stand in column 0, where no loss scores them.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For an invalid `padding_side`, and for an example with more or fewer images than placeholders.

    Example:

    ```python
    >>> from trl_padfix.tools.tiny import build_llava, train_tokenizer

    >>> _, processor = build_llava(train_tokenizer(["What is it? A cat."] * 4, vocab_size=400))
    >>> collator = DataCollatorForVisionLanguageModeling(processor, padding_side="left")
    >>> rows = [{"images": [], "messages": [{"role": "user", "content": text}]} for text in ("What is it?", "It")]
    >>> collator(rows)["attention_mask"][:, 0]
    tensor([1, 0])

    ```
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        return pad_left(batch, keep_first_labels=self.for_trainer) if self.padding_side == "left" else batch


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


def misplaced_message(row: int, images: int, placeholders: int, where: str) -> str:
    """Error text for an example with more or fewer images than placeholders."""
    return (
        f"Example {row} of {where} has {images} images and {placeholders} placeholders for them. Give each "
        "placeholder in its text one image, in their order."
    )


def count_placeholders(example: dict[str, Any], images: int, processor: Any) -> int:
    """Number of placeholders in the text of an example; `images` if the text does not show them."""
    value = next((example[name] for name in ("messages", "prompt", "text") if example.get(name)), None)
    if not value:
        return images
    if isinstance(value, str):
        placeholder = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
        return value.count(placeholder) if placeholder else images
    messages = [message for message in value if message["role"] != "tool"]
    parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
    placeholders = sum(part["type"] == "image" for part in parts)
    # TRL puts all images before the first plain text of a user.
    if any(m["role"] == "user" and isinstance(m.get("content"), str) for m in messages):
        placeholders += images
    return placeholders


def copied(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shallow copies of the examples, since TRL's collators write to them; `images` is a list, possibly empty."""
    copies = [dict(example) for example in examples]
    for example in copies:
        if "images" in example and example["images"] is None:
            example["images"] = []
        if "image" in example:
            image = example.pop("image")
            example["images"] = [] if image is None else [image]
    return copies
