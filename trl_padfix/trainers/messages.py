"""Lines about a run for its user."""

from __future__ import annotations

import logging

from tqdm.auto import tqdm


__all__ = ["say"]


def say(text: str) -> None:
    """Log a line at INFO; if logging does not show INFO, print it, unless logging is quiet."""
    log = logging.getLogger(__name__)  # accelerate's logger needs its state, which other stacks may not have
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif log.isEnabledFor(logging.WARNING):
        tqdm.write(text)
