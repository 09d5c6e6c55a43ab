"""TRL's collators for images and text that honour the padding side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import trl.trainer.dpo_trainer as trl_dpo
import trl.trainer.sft_trainer as trl_sft

from .collators import SidedCollator, pad_left


__all__ = [
    "DataCollatorForVisionLanguageModeling",
    "DataCollatorForVisionPreference",
    "VisionCollator",
    "check_ids_of_batch",
    "misplaced",
    "misplaced_images",
    "on_side_with_kl",
]


@dataclass
class VisionCollator(SidedCollator):
    """What the collators for images and text have in common; a mixin, in front of TRL's class."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        examples = copied(examples)
        found = misplaced_images(examples, self.processor)  # type: ignore[attr-defined]
        self.refuse_or_count(
            [row for row, *_ in found],
            misplaced(found[0], "the batch") if found else "",
            "rows have other images than placeholders; they are left to the model",
        )
        batch = dict(super().torch_call(examples))  # type: ignore[misc]
        check_ids_of_batch(self, batch, len(examples))
        return batch

    def refuse_cut(self, batch: dict[str, Any], count: int, what: str) -> None:
        """[`SidedCollator.refuse_or_count`] of the `count` examples of which a completion has no token."""
        rows = (batch["completion_mask"].sum(1) == 0).nonzero().flatten() % count
        within = f"a completion without a token (within `max_length={self.max_length}`)"  # type: ignore[attr-defined]
        why = "log-probability would be 0 whatever the model does. Drop them, or raise `max_length`"
        self.refuse_or_count(
            sorted(set(rows.tolist())),
            f"{what.capitalize()} {sorted(set(rows.tolist()))} of the batch have {within}: its {why}.",
            f"{what} have {within}, whose {why}",
        )


@dataclass
class DataCollatorForVisionPreference(VisionCollator, trl_dpo.DataCollatorForVisionPreference):
    """
    TRL's collator for preference pairs with images, padding on the side you choose.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Tokenizes the text and prepares the images.
        max_length (`int`, *optional*):
            Longest sequence; of longer ones the end is cut off.
        padding_side (`str`, *optional*, defaults to `"right"`):
            `"left"` or `"right"`: of ids, masks and token types alike.
        for_trainer (`bool`, *optional*, defaults to `False`):
            Whether rows that cannot be scored as they should be are counted in `odd_rows` and warned about, instead of
            being errors. Trainers, which have checked their data before the first step, set it.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For another `padding_side`, and for a pair whose images are not as many as its placeholders, or
            with a completion of which nothing is left.

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
        return self.on_side(batch)


@dataclass
class DataCollatorForVisionLanguageModeling(VisionCollator, trl_sft.DataCollatorForVisionLanguageModeling):
    """
    TRL's collator for language modelling with images, padding on the side you choose.

    Of `B` examples it makes `input_ids`, `attention_mask` and `labels`, each of shape `(B, L)`, and what the processor
    makes of their images. The first token of a left-padded row has no label: there is nothing to predict it from.

    Args:
        processor, max_length, padding_side:
            As in [`DataCollatorForVisionPreference`].
        for_trainer (`bool`, *optional*, defaults to `False`):
            As there; also, first tokens keep their labels, which trainers drop later.
        **kwargs:
            The other fields of TRL's.

    Raises:
        ValueError: For another `padding_side`, and for an example whose images are not as many as its placeholders.

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


def on_side_with_kl(collator: SidedCollator, batch: dict[str, Any]) -> dict[str, Any]:
    """Pad a batch of unpaired preferences, and the mismatched completions of its KL term, on the collator's side."""
    for prefix in ("", "KL_"):
        # The two batches may have one shape, so each is moved by its own mask.
        names = [prefix + name for name in _FOR_EACH_TOKEN if prefix + name in batch]
        if names:
            moved = collator.without_empty_rows({name.removeprefix(prefix): batch[name] for name in names})
            moved = collator.on_side(moved)
            batch |= {prefix + name: value for name, value in moved.items()}
    return batch


_FOR_EACH_TOKEN = ("input_ids", "attention_mask", "completion_mask", "token_type_ids", "mm_token_type_ids")


def check_ids_of_batch(collator: Any, batch: dict[str, Any], count: int) -> None:
    """
    Refuse token ids that the model has no embedding for, but for the collator's `stand_ins`, which stand for images.
    The rows of the data are the first `count` of the batch, and those of a second half if it has one.
    """
    if collator.vocabulary is None:
        return
    for ids in (batch[name] for name in ("input_ids", "KL_input_ids") if name in batch):
        known = (ids >= 0) & (ids < collator.vocabulary)
        known |= torch.isin(ids, torch.tensor(sorted(collator.stand_ins), dtype=ids.dtype))
        if known.all():
            continue
        row, column = (~known).nonzero()[0].tolist()
        decodable = [int(i) for i in ids[row] if 0 <= i < collator.vocabulary]
        tokenizer = getattr(collator.processor, "tokenizer", collator.processor)
        raise ValueError(
            f"Row {row % count} of the batch (counted from 0; it begins with {tokenizer.decode(decodable[:12])!r}) "
            f"holds the token id {int(ids[row, column])}, and the model has embeddings for 0 to "
            f"{collator.vocabulary - 1}: its forward would stop (on a GPU with a device assertion). Use the model's "
            "own processor, or `model.resize_token_embeddings(len(processor.tokenizer))`."
        )


def misplaced(found: tuple[int, int, int], where: str) -> str:
    """Error text for an example found by [`misplaced_images`]."""
    row, given, wanted = found
    return (
        f"Example {row} of {where} has {given} images and {wanted} placeholders for them. Give each placeholder in "
        "its text one image, in their order."
    )


def misplaced_images(examples: list[dict[str, Any]], processor: Any) -> list[tuple[int, int, int]]:
    """Each example with more or fewer images than placeholders: its number, and how many of both."""
    found = []
    for i, example in enumerate(examples):
        given = len(example["images"])
        value = next((example[name] for name in ("messages", "prompt", "text") if example.get(name)), None)
        if isinstance(value, str):
            placeholder = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
            wanted = value.count(placeholder) if placeholder else given
        elif value:
            messages = [message for message in value if message["role"] != "tool"]
            parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
            wanted = sum(part["type"] == "image" for part in parts)
            # Before the first plain text of the user TRL puts all images.
            wanted += given if any(m["role"] == "user" and isinstance(m.get("content"), str) for m in messages) else 0
        else:
            continue
        if wanted != given:
            found.append((i, given, wanted))
    return found


def copied(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the examples, since TRL's collators write to them; `images` is a list in each, perhaps empty."""
    copies = [dict(example) for example in examples]
    for example in copies:
        if "images" in example and example["images"] is None:
            example["images"] = []
        if "image" in example:
            image = example.pop("image")
            example["images"] = [] if image is None else [image]
    return copies
