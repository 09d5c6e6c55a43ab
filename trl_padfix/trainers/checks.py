"""Checks of the arguments of a trainer, before a model is loaded or data is tokenized."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin

from ..core.errors import PaddingRemovalError
from ..core.model.positions import length_dependent_ropes
from .data.collators import check_padding_side
from .data.columns import image_counts, values
from .data.vision_collators import misplaced, misplaced_images
from .field_types import check_field_types, check_packing
from .parts import Settings


__all__ = [
    "check_arguments",
    "check_vision",
    "check_vocabulary",
    "column_names",
    "image_columns",
    "require_columns",
    "require_eos",
    "require_rows",
    "require_teacher",
    "rope_kind_beyond",
    "tokenizer_of",
]


def check_arguments(config: Any, settings: Settings, task: Any, given: dict[str, Any]) -> None:
    """Check what a trainer is `given` (arguments by name), and our fields, also where they were set after `config`."""
    check_field_types(config)
    side, collator = settings.padding_side, given.get("data_collator")
    check_padding_side(side, optional=True)
    if side is not None and collator is not None and type(collator) not in {*task.collators, *task.collators.values()}:
        raise ValueError(
            f"`padding_side={side!r}` is for the default collator, and `data_collator` is your own "
            f"`{type(collator).__name__}`, which pads as it does. Set the side there, and leave `padding_side` out."
        )
    check_packing(settings)
    if settings.prefix_sharing is True and getattr(config, "neftune_noise_alpha", None):
        raise PaddingRemovalError(
            "`neftune_noise_alpha` gives every token of every row a noise of its own, so no two rows begin alike and "
            "there is no prefix to share. Set `prefix_sharing=False`: `padding_free` alone keeps the noise of the "
            "padded batch."
        )
    if getattr(config, "use_liger_kernel", False) and not runs_triton(config):
        raise ValueError(
            "`use_liger_kernel=True` puts Triton kernels into the model, which run on GPUs only and fail in the first "
            "forward on a CPU. Leave it out here: the numbers are the same."
        )
    for name in ("model", "teacher_model"):
        _check_model(given.get(name), settings.padding_free)
    _check_tokenizer(given.get("processing_class"))
    data = given.get("train_dataset")
    require_rows(data, "train")
    if settings.padding_free and not task.takes_images and (images := image_columns(data)):
        raise PaddingRemovalError(
            f"The training dataset has image data ({images}), and packing what images become in the decoder is not "
            "supported. Set `padding_free=False`, or drop these columns to train on the text."
        )


def runs_triton(config: Any) -> bool:
    """Whether the device of a configuration runs Triton's kernels."""
    return config.device.type != "cpu"


def _check_model(model: Any, removes_padding: bool) -> None:
    """Refuse models that no trainer here can train; an id or path is looked at once it is loaded."""
    if model is None or isinstance(model, str):
        return
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(
            f"The model is a `{type(model).__name__}`, which has no `config`: TRL's trainers take a model id, a "
            "transformers model or a PEFT model. Of a wrapper, such as one with a value head, pass the model inside "
            "it (`model.pretrained_model`); to train the wrapper in a loop of your own, use `remove_padding` on it."
        )
    if removes_padding and getattr(config, "is_encoder_decoder", False):
        raise PaddingRemovalError(
            f"Padding cannot be removed from {type(model).__name__}: it is an encoder-decoder, and only decoders "
            "that attend to themselves alone are packed. Set `padding_free=False`, or use a decoder-only model."
        )


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer of a processor; a tokenizer itself."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def _check_tokenizer(processing_class: Any) -> None:
    """Refuse what is no tokenizer or processor, and a tokenizer that can neither pad nor end a text."""
    tokenizer = tokenizer_of(processing_class)
    if tokenizer is None:
        return
    if not (callable(tokenizer) and hasattr(tokenizer, "pad_token")):
        raise TypeError(
            f"`processing_class` is a `{type(processing_class).__name__}`, and a tokenizer or processor is needed. "
            "Pass `AutoTokenizer.from_pretrained(...)`, or leave it out: TRL then loads that of the model."
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has neither a pad token nor an EOS token, so there is nothing to pad batches or to end "
            "completions with. Set `tokenizer.pad_token` and `tokenizer.eos_token`."
        )
    check_vocabulary(tokenizer)


def check_vocabulary(processing_class: Any) -> None:
    """Refuse a tokenizer of special tokens only: transformers makes it of a model folder without tokenizer files."""
    tokenizer = tokenizer_of(processing_class)
    if tokenizer is None or set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        return
    if not tokenizer("a text", add_special_tokens=False)["input_ids"]:  # tokens may be bytes, without a vocabulary
        raise ValueError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no token but {tokenizer.all_special_tokens}, so every "
            "text would be empty: its files (`tokenizer.json`) are missing. Save the tokenizer into the folder of the "
            "model (`tokenizer.save_pretrained(...)`), or pass the right one as `processing_class`."
        )


def require_rows(dataset: Any, dataset_name: str) -> None:
    """Raise a `ValueError` if a dataset is empty, or a stream has no first row."""
    is_stream = isinstance(dataset, IterableDataset)
    if (isinstance(dataset, Sized) and len(dataset) == 0) or (is_stream and next(iter(dataset), None) is None):
        kind = "a stream without a row" if is_stream else "empty"
        raise ValueError(f"The {dataset_name} dataset is {kind}: check its files, split or filter.")


def require_columns(dataset: Any, dataset_name: str, alternatives: list[set[str]], needs: str) -> None:
    """Raise a `ValueError` if a dataset has the columns of none of the `alternatives`; the first one is named."""
    columns = column_names(dataset)
    if all(wanted - columns for wanted in alternatives):
        missing = sorted(alternatives[0] - columns)
        raise ValueError(
            f"The {dataset_name} dataset has no column {' and no column '.join(map(repr, missing))}; it has "
            f"{sorted(columns)}. {needs}: rename its columns, or map it to them."
        )


def require_eos(dataset: Any, processing_class: Any, column: str = "chosen") -> None:
    """Raise a `ValueError` if the plain texts of `column` are to be ended with an EOS token and there is none."""
    if tokenizer_of(processing_class).eos_token is None and isinstance(next(iter(dataset)).get(column), str):
        raise ValueError(
            "The tokenizer has no EOS token, and TRL ends every plain-text completion with one. Set "
            "`tokenizer.eos_token`, or give chat messages."
        )


def column_names(dataset: Any) -> set[str]:
    """The columns of a dataset, a streamed one included; none where there is no dataset."""
    if dataset is None:
        return set()
    return set(getattr(dataset, "column_names", None) or next(iter(dataset)))


def image_columns(dataset: Any) -> str:
    """The columns of a dataset that have images, for a message; empty without any."""
    return ", ".join(map(repr, sorted(column_names(dataset) & {"image", "images"})))


def check_vision(dataset: Dataset, processor: Any, dataset_name: str) -> None:
    """Raise a `ValueError` for an example whose images are not as many as its placeholders; none is decoded."""
    column = "images" if "images" in dataset.column_names else "image"
    texts = [c for c in ("messages", "prompt", "text") if c in dataset.column_names]
    rows = zip(image_counts(dataset, column).tolist(), *(values(dataset, text) for text in texts), strict=True)
    for number, (count, *words) in enumerate(rows):
        example = {"images": [None] * count, **dict(zip(texts, words, strict=True))}
        for _, given, wanted in misplaced_images([example], processor):
            raise ValueError(misplaced((number, given, wanted), f"the {dataset_name} dataset"))


def require_teacher(given: dict[str, Any]) -> None:
    """Refuse a student without a teacher."""
    if given.get("teacher_model") is None:
        raise ValueError(
            "The student needs a teacher, and `teacher_model` is not given. Pass a model, or the id of one "
            "(`--teacher_model_name_or_path` on the command line)."
        )


def rope_kind_beyond(model: torch.nn.Module, max_length: int | None) -> str | None:
    """
    The kind of a rotary embedding whose frequencies depend on the longest row of a forward, if rows may be longer than
    those that the model was first trained with.
    """
    for module, kind in length_dependent_ropes(model).items():
        limit = getattr(module, "original_max_seq_len", None) or module.config.max_position_embeddings
        given = getattr(module.config, "rope_parameters", None) or getattr(module.config, "rope_scaling", {})
        if max_length is None or max_length > given.get("original_max_position_embeddings", limit):
            return kind
    return None
