"""Lines about a run for its user."""

from __future__ import annotations

import logging

from tqdm.auto import tqdm


__all__ = ["counted", "say"]


def counted(number: int, noun: str) -> str:
    """`"1 row"`, `"2,000 rows"`, `"4 batches"`."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{number:,} {noun}{ending}"


def say(text: str) -> None:
    """Log a line at INFO. If INFO is not shown, print it, unless a higher level is set."""
    log = logging.getLogger(__name__)  # accelerate's logger needs its state, which other stacks may not have
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif log.isEnabledFor(logging.WARNING) and logging.getLogger("trl_padfix").level <= logging.INFO:
        tqdm.write(text)
