"""Which cells of a matrix every run takes, and which are left to `pytest -m slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


MATRIX = (pytest.mark.slow, pytest.mark.matrix)


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
