"""
TRL's experimental trainers without padding, by TRL's names: `from trl_padfix.experimental.orpo import ORPOTrainer`.

A module is imported when it is asked for, and imports TRL's of the same name. TRL may change or remove these in any
release; what it has removed is gone here too, with an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..versions import TESTED, installed_version, require


__all__ = ["of_trl"]


@contextmanager
def of_trl(name: str) -> Iterator[None]:
    """
    Around the import of `trl.experimental.NAME`.

    Raises:
        ImportError: If the installed TRL is older than those this was run with, or has the module no more.
    """
    require("trl", "experimental")
    try:
        yield
    except ImportError as error:
        if error.name != f"trl.experimental.{name}":
            raise
        tested = TESTED[-1].trl
        raise ImportError(
            f"TRL {installed_version('trl')} has no `trl.experimental.{name}` (any more), so `trl_padfix.experimental."
            f"{name}` is gone with it; TRL {tested} had it. Run: pip install 'trl=={tested}', or use another trainer."
        ) from error
