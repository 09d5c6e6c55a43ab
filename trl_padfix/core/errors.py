"""Errors for what cannot be packed: a model or a setting, or a single call."""

from __future__ import annotations

from typing import Any

import torch


__all__ = ["PaddingRemovalError", "UnpackableBatchError", "UnpackableCallError", "require"]


def require(kind: type, **given: Any) -> None:
    """Raise a `TypeError` for an argument, given by its name, that is of another type."""
    for name, value in given.items():
        if not isinstance(value, kind):
            remedy = " A tokenizer makes tensors with `return_tensors='pt'`." if kind is torch.Tensor else ""
            raise TypeError(f"`{name}` must be a `{kind.__name__}`, got `{type(value).__name__}`.{remedy}")


class PaddingRemovalError(NotImplementedError):
    """
    Padding cannot be removed here with exact results. The message has the obstacle, the reason and a remedy.

    Example:

    ```python
    >>> from transformers import BertConfig, BertModel
    >>> from trl_padfix import PaddingRemovalError, remove_padding

    >>> try:
    ...     remove_padding(BertModel(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)))
    ... except PaddingRemovalError as error:
    ...     print(str(error).partition(":")[0])
    Padding cannot be removed from BertModel

    ```
    """


class UnpackableCallError(PaddingRemovalError):
    """
    A single call cannot be packed. Unless the handle is `strict`, the call is computed padded and unchanged.

    Args:
        kind (`str`):
            The feature of the call that cannot be packed. The handle warns once for each kind.
        message (`str`):
            What is wrong with its values, why it matters, and what to do.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class UnpackableBatchError(UnpackableCallError, ValueError):
    """An attention mask with wrong values or a wrong shape. Also a `ValueError`, for code that builds a layout."""
