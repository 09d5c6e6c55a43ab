"""
Rows that begin alike, in one optimizer step: `group_by_prefix`.

Plain functions of token ids and token counts, so that every process and every resumed run finds the same order.
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
    Sort rows by their token ids; return the sorted rows, and how many tokens each has in common with the one before.
    """
    order, common = sort_rows([_key(row) for row in ids], width=4)
    return np.array(order, dtype=np.int64), np.array(common, dtype=np.int64)


def shared_prefix_lengths(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> np.ndarray:
    """How many tokens each row of `left` and its counterpart in `right` begin with in common, `(n,)`."""
    return np.array([common_bytes(_key(a), _key(b)) // 4 for a, b in zip(left, right, strict=True)], dtype=np.int64)


def _key(ids: np.ndarray) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()  # the bytes of big-endian numbers sort as these do


def group_rows(order: Sequence[int] | np.ndarray, costs: RowCosts, step: int) -> np.ndarray:
    """
    Rearrange the `order` of an epoch so that rows with long common prefixes are in one optimizer step of `step` rows.

    Groups are brought together from the longest common prefix to shorter ones, as long as they fit into a step; they
    are dealt out to the steps in the order in which the epoch has them, the largest first. What is common to all rows
    counts for nothing, because it is in every step anyway. All that is random about the result is in `order`.
    """
    order = np.asarray(order, dtype=np.int64)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    groups = [rows[np.argsort(place[rows])] for rows in _groups(costs, step, place)]
    groups.sort(key=lambda rows: (-len(rows), place[rows[0]]))
    steps: list[list[np.ndarray]] = [[] for _ in range(-(-len(order) // step))]
    # On top is the step with the most room; a last step that is not full has less from the start.
    rooms = [(-min(step, len(order) - i * step), i) for i in range(len(steps))]
    heapq.heapify(rooms)
    for rows in groups:
        while len(rows):
            room, at = rooms[0]
            steps[at].append(rows[:-room])
            taken, rows = len(steps[at][-1]), rows[-room:]
            if room + taken:
                heapq.heapreplace(rooms, (room + taken, at))
            else:
                heapq.heappop(rooms)
    *full, last = [np.concatenate(groups) for groups in steps] if steps else [order]
    full.sort(key=lambda rows: place[rows].min())
    return np.concatenate([*full, last])


def _groups(costs: RowCosts, most: int, place: np.ndarray) -> list[np.ndarray]:
    """Groups of at most `most` rows, made from the longest common prefixes to shorter ones."""
    gaps = np.flatnonzero(costs.joined)
    # Among prefixes of one length from another row on in each epoch, so that large groups are not always cut alike.
    begin = place[costs.order[0]] if len(place) else 0
    gaps = gaps[np.lexsort(((gaps + begin) % max(len(place), 1), -costs.common[gaps]))]
    first, last = np.arange(len(costs)), np.arange(len(costs))  # of the group that ends here, and that begins here
    first_of, last_of = first.tolist(), last.tolist()
    for gap in gaps.tolist():
        begin, end = first_of[gap - 1], last_of[gap]
        if end - begin < most:
            first_of[end], last_of[begin] = begin, end
    groups, begin = [], 0
    while begin < len(costs):
        groups.append(costs.order[begin : last_of[begin] + 1])
        begin = last_of[begin] + 1
    return groups
