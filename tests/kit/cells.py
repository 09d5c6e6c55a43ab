"""Which cells of a matrix every run takes, and which are left to `pytest -m slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


MATRIX = (pytest.mark.slow, pytest.mark.matrix)


def once_each(cases: Iterable[Any], modes: Sequence[Any], *, fully: Sequence[Any] = ()) -> list[Any]:
    """
    Every case in every mode, as parameters of a test: each case is fast in one mode, by turns, and slow in the others.

    Args:
        cases (`Iterable`):
            Cases of a matrix, its first parameter; one that is a tuple stands for several.
        modes (`Sequence`):
            Modes of a matrix, its second parameter.
        fully (`Sequence`):
            Cases that are fast in all modes.
    """
    return [
        pytest.param(*_parameters(case), mode, marks=() if case in fully or j == i % len(modes) else MATRIX)
        for i, case in enumerate(cases)
        for j, mode in enumerate(modes)
    ]


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Every case as a parameter of a test (a tuple: as several), slow unless it is among the `fast` ones."""
    fast = list(fast)
    return [pytest.param(*_parameters(case), marks=() if case in fast else MATRIX) for case in cases]


def by_turns(cases: Iterable[Any], *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every case once, as parameters of a test, with one value of each other axis, by turns."""
    rows = []
    for i, case in enumerate(cases):
        row = list(_parameters(case))
        for axis in axes:
            row.append(axis[i % len(axis)])
            i //= len(axis)
        rows.append(tuple(row))
    return rows


def _parameters(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
