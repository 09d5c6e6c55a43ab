"""
TRL's experimental trainers without padding, by TRL's names: `from trl_padfix.experimental.orpo import ORPOTrainer`.

Each module imports TRL's module of the same name, and only when it is imported itself. TRL may change or remove these
in any release; importing a module that TRL has removed raises an error with the last version that had it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..versions import TESTED, installed_version, require


__all__ = ["of_trl"]


@contextmanager
def of_trl(name: str) -> Iterator[None]:
    """
    A block that imports `trl.experimental.NAME`, with an error that names the remedy.

    Raises:
        ImportError: If the installed TRL is older than the tested versions, or does not have the module any more.
    """
    require("trl", "experimental")
    try:
        yield
    except ImportError as error:
        if error.name != f"trl.experimental.{name}":  # TRL has the module, but one of its imports failed
            raise
        tested = TESTED[-1].trl
        raise ImportError(
            f"TRL {installed_version('trl')} has no `trl.experimental.{name}` (any more), so `trl_padfix.experimental."
            f"{name}` is gone with it; TRL {tested} had it. Run: pip install 'trl=={tested}', or use another trainer."
        ) from error
