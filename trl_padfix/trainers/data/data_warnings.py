"""What is doubtful in data: a warning with the first rows, because TRL trains on it, or with `strict` an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence


__all__ = ["name_rows", "warn_or_raise"]

logger = logging.getLogger(__name__)

NAMED_ROWS = 5
"""Number of rows that a message names."""


def warn_or_raise(message: str, strict: bool) -> None:
    """
    Warn about data that can be trained on.

    Raises:
        ValueError: With `strict`.
    """
    if strict:
        raise ValueError(message)
    logger.warning(f"{message} This is a warning, because TRL trains on it; `strict=True` makes it an error.")


def name_rows(rows: Sequence[int], what: str = "row") -> str:
    """The first of `rows` (counted from 0) and their number, as the beginning of a message."""
    first = ", ".join(map(str, rows[:NAMED_ROWS]))
    if len(rows) == 1:
        return f"{what.capitalize()} {first} (counted from 0)"
    others = f", {len(rows)} in all" if len(rows) > NAMED_ROWS else ""
    return f"{what.capitalize()}s {first} (counted from 0{others})"
