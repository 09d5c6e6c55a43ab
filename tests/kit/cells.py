"""Which cells of a matrix every run takes, and which are left to `pytest -m slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
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


def every_second(cells: Iterable[Any]) -> list[Any]:
    """Cells as parameters of a test, every second one of those that are fast slow instead."""
    cells = [cell if hasattr(cell, "marks") else pytest.param(*_parameters(cell)) for cell in cells]
    fast = [i for i, cell in enumerate(cells) if not cell.marks]
    return [cell if i not in fast[1::2] else pytest.param(*cell.values, marks=pytest.mark.slow)
            for i, cell in enumerate(cells)]  # fmt: skip


def every_pair(*axes: Iterable[Any]) -> list[Any]:
    """
    The product of several axes as parameters of a test: as many cells are fast as it takes for any two values of any
    two axes to meet in one, the others are slow.

    Args:
        axes (`Iterable`):
            Values of each axis; one that is a tuple stands for several parameters.
    """
    cells = list(product(*(enumerate(axis) for axis in axes)))
    # Values are distinguished by their positions, so they need not be hashable.
    met = [{((a, i), (b, j)) for (a, (i, _)), (b, (j, _)) in combinations(enumerate(cell), 2)} for cell in cells]
    wanted, fast = set().union(*met), set()
    while wanted:
        fast.add(best := max(range(len(cells)), key=lambda i: len(met[i] & wanted)))
        wanted -= met[best]
    rows = [[part for _, value in cell for part in _parameters(value)] for cell in cells]
    return [pytest.param(*row, marks=() if i in fast else MATRIX) for i, row in enumerate(rows)]


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
