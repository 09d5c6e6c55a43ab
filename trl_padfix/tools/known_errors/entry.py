"""What is known of an error."""

from __future__ import annotations

from dataclasses import dataclass


__all__ = ["KnownError"]


@dataclass(frozen=True)
class KnownError:
    """
    An error and its explanation.

    Attributes:
        name (`str`): Short, for a heading.
        pattern (`str`): Regular expression that its text matches, whatever the case and the line breaks.
        cause (`str`): What brought it about.
        fix (`str`): What to do.
        source (`str`):
            Where its text comes from, separated by `;`: a file of a package in the version in which it was read, a
            public issue with the text in it, or in words what prints it.
    """

    name: str
    pattern: str
    cause: str
    fix: str
    source: str
