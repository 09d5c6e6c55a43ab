"""No connection that nobody asked for: the counters of the libraries below are off unless the user sets them."""

from __future__ import annotations

import os


__all__ = ["count_nothing"]

_COUNTERS = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # TRL's trainers report their class when they are built
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # `datasets` counts uses of its builders, for local files too
}


def count_nothing() -> None:
    """Set the variables before `datasets` and `huggingface_hub` are imported; what the user has set stays."""
    for name, value in _COUNTERS.items():
        os.environ.setdefault(name, value)
