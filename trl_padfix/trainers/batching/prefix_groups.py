"""
Rows with a shared prefix in one optimizer step: `group_by_prefix`.

Plain functions of token ids and token counts, so every process and every resumed run finds the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ...core.layout.prefix_tree import common_bytes, sort_rows
from .token_costs import RowCosts


__all__ = ["group_rows", "shared_prefix_lengths", "sort_by_prefix"]


def sort_by_prefix(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """
    Sort rows by their token ids. Returns their order, and the number of tokens that each sorted row shares with the
    one before it: `[[1, 2], [3], [1, 2, 4]]` give `[0, 2, 1]` and `[0, 2, 0]`.
    """
    order, common = sort_rows([_key(row) for row in ids], width=4)
    return np.array(order, dtype=np.int64), np.array(common, dtype=np.int64)


def shared_prefix_lengths(rows: Sequence[np.ndarray], other_rows: Sequence[np.ndarray]) -> np.ndarray:
    """Number of tokens that each row shares with its counterpart in `other_rows`, from the first one on, `(n,)`."""
    pairs = zip(rows, other_rows, strict=True)
    return np.array([common_bytes(_key(a), _key(b)) // 4 for a, b in pairs], dtype=np.int64)


def _key(ids: np.ndarray) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()  # bytes of big-endian numbers sort like the numbers


def group_rows(order: Sequence[int] | np.ndarray, costs: RowCosts, step: int) -> np.ndarray:
    """
    Rearrange the `order` of an epoch so that rows with long shared prefixes are in one optimizer step of `step` rows.

    Groups are merged from the longest shared prefix to shorter ones, as long as they fit into a step. They fill the
    steps from the largest group to smaller ones, and among groups of one size in the order of the epoch. The prefix of
    all rows does not count, because it is in every step anyway. The result is random only through `order`.
    """
    order = np.asarray(order, dtype=np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))  # inverse permutation
    groups = [rows[np.argsort(place[rows])] for rows in _groups(costs, step, place)]
    groups.sort(key=lambda rows: (-len(rows), place[rows[0]]))
    steps: list[list[np.ndarray]] = [[] for _ in range(-(-len(order) // step))]
    # `heapq` has the smallest item on top, so negative free rows put the step with the most room there. An incomplete
    # last step has less room from the start.
    heap = [(-min(step, len(order) - i * step), i) for i in range(len(steps))]
    heapq.heapify(heap)
    for rows in groups:
        while len(rows):
            free, index = -heap[0][0], heap[0][1]
            taken, rows = rows[:free], rows[free:]
            steps[index].append(taken)
            if len(taken) < free:
                heapq.heapreplace(heap, (len(taken) - free, index))
            else:
                heapq.heappop(heap)
    *full, last = [np.concatenate(groups) for groups in steps] if steps else [order]
    full.sort(key=lambda rows: place[rows].min())
    return np.concatenate([*full, last])


def _groups(costs: RowCosts, limit: int, place: np.ndarray) -> list[np.ndarray]:
    """Groups of at most `limit` rows, merged from the longest shared prefixes to shorter ones."""
    gaps = np.flatnonzero(costs.same_group)  # gap i lies between the sorted rows i - 1 and i
    # Among gaps of equal length the first one changes from epoch to epoch, so a large group is cut differently.
    offset = place[costs.order[0]] if len(place) else 0
    gaps = gaps[np.lexsort(((gaps + offset) % max(len(place), 1), -costs.shared[gaps]))]
    # First row of the group that ends at a row, and last row of the group that begins at it.
    first_of, last_of = list(range(len(costs))), list(range(len(costs)))
    for gap in gaps.tolist():
        begin, end = first_of[gap - 1], last_of[gap]
        if end - begin < limit:
            first_of[end], last_of[begin] = begin, end
    groups, begin = [], 0
    while begin < len(costs):
        groups.append(costs.order[begin : last_of[begin] + 1])
        begin = last_of[begin] + 1
    return groups
