"""The error of everything that cannot be packed."""

from __future__ import annotations


__all__ = ["PaddingRemovalError"]


class PaddingRemovalError(NotImplementedError):
    """
    Padding cannot be removed here with exact results; the message names what, why and what to do.

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
