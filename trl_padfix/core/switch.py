"""The emergency switch: with `TRL_PADFIX_OFF=1` in the environment every model stays as it is."""

from __future__ import annotations

import os


__all__ = ["OFF", "is_off"]

OFF = "TRL_PADFIX_OFF"
"""Environment variable that turns padding removal, prefix sharing and token budgets off."""


def is_off() -> bool:
    """Whether the environment turns this package off."""
    return os.environ.get(OFF, "").lower() not in ("", "0", "false", "no", "off")
