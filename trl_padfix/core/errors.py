"""The error of everything that cannot be packed."""

from __future__ import annotations


__all__ = ["PaddingRemovalError"]


class PaddingRemovalError(NotImplementedError):
    """Padding cannot be removed here with exact results; the message names what, why and what to do."""
