"""What a trainer is given, checked before a model is loaded or data is tokenized."""

from __future__ import annotations

from typing import Any

from ..attention import PaddingRemovalError


__all__ = ["check_model", "column_names", "refuse_images", "require_columns"]


def check_model(model: Any, removes_padding: bool) -> None:
    """
    Refuse models that no trainer here can train.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy or reward model given to the trainer; an id or path is looked at once it is loaded.
        removes_padding (`bool`):
            Whether padding is to be removed from it.

    Raises:
        TypeError: If it is a wrapper (of a value head, for instance) and not a model with a `config`.
        PaddingRemovalError: If it is an encoder-decoder.
    """
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


def refuse_images(dataset: Any) -> None:
    """
    Raises:
        PaddingRemovalError: If `dataset` has a column of images.
    """
    images = sorted(column_names(dataset) & {"image", "images"})
    if images:
        raise PaddingRemovalError(
            f"The training dataset has image data ({', '.join(map(repr, images))}), and packing what images become in "
            "the decoder is not supported. Set `padding_free=False`, or drop these columns to train on the text."
        )


def require_columns(dataset: Any, dataset_name: str, alternatives: list[set[str]], needs: str) -> None:
    """
    Raises:
        ValueError: If `dataset` lacks columns of every one of the `alternatives`; those of the first are named.
    """
    columns = column_names(dataset)
    if all(wanted - columns for wanted in alternatives):
        missing = sorted(alternatives[0] - columns)
        raise ValueError(
            f"The {dataset_name} dataset has no column {' and no column '.join(map(repr, missing))}; it has "
            f"{sorted(columns)}. {needs}: rename its columns, or map it to them."
        )


def column_names(dataset: Any) -> set[str]:
    """The columns of a dataset, a streamed one included; none where there is no dataset."""
    if dataset is None:
        return set()
    return set(getattr(dataset, "column_names", None) or next(iter(dataset)))
