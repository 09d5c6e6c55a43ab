"""The errors that users paste: what tells them, what causes them, what to do. For `doctor --explain`."""

from __future__ import annotations

import re

from . import inputs, kernels, machine, training
from .entry import KnownError


__all__ = ["KNOWN_ERRORS", "KnownError", "explain"]

KNOWN_ERRORS = (*kernels.ERRORS, *training.ERRORS, *machine.ERRORS, *inputs.ERRORS)


def explain(text: str) -> list[KnownError]:
    """
    The known errors in a text, such as a traceback; none if it holds none.

    Args:
        text (`str`):
            What was printed.

    Example:

    ```python
    >>> from trl_padfix.tools.known_errors import explain

    >>> [error.name for error in explain("RuntimeError: FlashAttention only supports Ampere GPUs or newer.")]
    ['GPU too old for FlashAttention']

    ```
    """
    line = " ".join(text.split())
    return [error for error in KNOWN_ERRORS if re.search(error.pattern, line, re.IGNORECASE)]
