"""Warnings about doubtful data, which name the first rows; with `strict` they are errors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence


__all__ = ["count_and_warn", "name_rows", "warn_or_raise"]

logger = logging.getLogger(__name__)

NAMED_ROWS = 5
"""Number of rows that a message names."""


def warn_or_raise(message: str, strict: bool) -> None:
    """
    Warn about data that a run can go on with.

    Raises:
        ValueError: With `strict`.
    """
    if strict:
        raise ValueError(message)
    logger.warning(f"{message} `strict=True` makes this an error.")


def count_and_warn(counts: Counter[str], what: str, added: int = 1, example: str = "") -> None:
    """Add rows of a stream to `counts[what]`, and warn of their number at the first and at each power of 10."""
    before = counts[what]
    counts[what] += added
    # One more digit than before means that a power of 10 lies between the two counts.
    if before == 0 or len(str(before)) < len(str(counts[what])):
        logger.warning(f"So far {counts[what]} {what}. {example}".rstrip())


def name_rows(rows: Sequence[int], what: str = "row") -> str:
    """The first of `rows` (counted from 0) and their number, as the beginning of a message."""
    first = ", ".join(map(str, rows[:NAMED_ROWS]))
    if len(rows) == 1:
        return f"{what.capitalize()} {first} (counted from 0)"
    others = f", {len(rows)} in all" if len(rows) > NAMED_ROWS else ""
    return f"{what.capitalize()}s {first} (counted from 0{others})"
