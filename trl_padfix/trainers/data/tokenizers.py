"""Checks of the tokenizer of a trainer, before data is tokenized."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


__all__ = ["check_tokenizer", "check_vocabulary", "require_eos", "tokenizer_of"]


def tokenizer_of(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> Any:
    """The tokenizer of a processor; a tokenizer itself."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def check_tokenizer(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> None:
    """Refuse a tokenizer that can neither pad nor end a text, or has no vocabulary."""
    tokenizer = tokenizer_of(processing_class)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has neither a pad token nor an EOS token, so there is nothing to pad batches or to end "
            "completions with. Set `tokenizer.pad_token` and `tokenizer.eos_token`."
        )
    check_vocabulary(tokenizer)


def check_vocabulary(processing_class: PreTrainedTokenizerBase | ProcessorMixin) -> None:
    """Refuse a tokenizer of special tokens only: transformers makes one for a folder without tokenizer files."""
    tokenizer = tokenizer_of(processing_class)
    if tokenizer is None or set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return
    if not tokenizer("a text", add_special_tokens=False)["input_ids"]:  # tokens may be bytes, without a vocabulary
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no token but {tokenizer.all_special_tokens}, so every "
            "text would be empty: its files (`tokenizer.json`) are missing. Save the tokenizer into the folder of the "
            "model (`tokenizer.save_pretrained(...)`), or pass the right one as `processing_class`."
        )


def require_eos(
    dataset: Dataset | IterableDataset,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin,
    columns: Iterable[str],
) -> None:
    """Raise a `ValueError` if plain texts in `columns` need an EOS token and the tokenizer has none."""
    if tokenizer_of(processing_class).eos_token is not None:
        return
    row = next(iter(dataset), {})
    if any(isinstance(row.get(column), str) for column in columns if column != "prompt"):
        raise ValueError(
            "The tokenizer has no EOS token, and TRL ends every plain-text completion with one. Set "
            "`tokenizer.eos_token`, or give chat messages."
        )
