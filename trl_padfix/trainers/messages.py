"""Lines about a run for its user."""

from __future__ import annotations

import logging

from tqdm.auto import tqdm


__all__ = ["say"]


def say(text: str) -> None:
    """Log a line at INFO; where logging is not set up for that, print it, unless logging is quiet."""
    log = logging.getLogger(__name__)  # that of accelerate needs its state, which a stack of its own may not have
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(text)
    elif log.isEnabledFor(logging.WARNING):
        tqdm.write(text)
