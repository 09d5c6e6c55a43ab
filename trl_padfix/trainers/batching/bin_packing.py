"""
Which rows go together: micro-batches under a token budget, and processes with equal work.

Everything is a function of its arguments alone, so that every process plans the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.layout.shared_prefixes import FORWARD, STATES
from .token_costs import RowCosts


__all__ = ["StepPlan", "assign", "balance", "pack_depth_first", "split"]

Unit = tuple[float, list[int]]
"""Tokens of rows that stay together, and the rows."""


def split(costs: RowCosts, budget: int) -> list[list[int]]:
    """
    Split rows into micro-batches of at most `budget` tokens: about as few as it takes, and then of even size.

    Rows of one group stay together as far as the budget goes. A row of more tokens than that is a micro-batch of its
    own. Returns the rows of each micro-batch, that with the most tokens first.
    """
    common = costs.common_to_all
    costs, budget = costs.without_common(common), budget - common
    units = _units(costs, budget)
    bins: list[list[Unit]] = []
    loads: list[int] = []
    for size, rows in units:
        at = next((b for b, load in enumerate(loads) if load + size <= budget), len(bins))
        if at == len(bins):
            bins.append([])
            loads.append(0)
        bins[at].append((size, rows))
        loads[at] += size
    even = _evenly(units, len(bins))
    if all(_tokens(part) <= budget or len(part) == 1 for part in even):
        bins = even
    return [sorted(row for _, rows in part for row in rows) for part in sorted(bins, key=_tokens, reverse=True)]


def pack_depth_first(costs: RowCosts, budget: int) -> list[list[int]]:
    """
    Split rows into micro-batches that see each other's prefixes, each of which is computed once in their step.

    Tokens of a micro-batch and the prefixes that it has in common with others are at most `budget`; a prefix of which
    keys and values are kept until it is computed again counts by these, where that is quicker (see [`STATES`]). A row
    of more tokens is a micro-batch of its own. Returns the rows of each micro-batch, depth first: those that have a
    prefix in common are neighbours.
    """
    return [sorted(part) for _, part in _branches(costs, budget)]


def _branches(costs: RowCosts, room: float) -> list[Unit]:
    """[`pack_depth_first`] with the tokens of each part; all rows have a prefix in common, or none."""
    common = costs.common_to_all
    beyond = costs.without_common(common)
    total, least = beyond.total(), max(int(beyond.each.min()), 1)
    keep, again = room - common, room - common * STATES
    parts = [-(-total // max(left, least)) for left in (keep, again)]
    # The second forward of a prefix is a third of what a step makes of its tokens.
    is_again = FORWARD * (parts[0] - parts[1]) > common / 3
    left, of_prefix = (again, common * STATES) if is_again else (keep, common)
    bins: list[tuple[float, list[int]]] = []
    whole: list[Unit] = []
    for group, size in _groups(beyond):
        if size <= left or len(group) == 1:
            whole.append((size, group))
        else:
            bins += [(load, [group[i] for i in part]) for load, part in _branches(beyond[group], left)]
    cut = len(bins)
    for size, group in sorted(whole, key=lambda unit: -unit[0]):
        at = next((b for b, (load, _) in enumerate(bins) if load + size <= left), len(bins))
        bins[at:] = (
            [(size, group)] if at == len(bins) else [(bins[at][0] + size, bins[at][1] + group), *bins[at + 1 :]]
        )
    if is_again and bins[-1][0] > keep:  # for the last of them the prefix is there with all its activations
        small = next((b for b in range(cut, len(bins)) if bins[b][0] <= keep), None)
        if small is not None:
            bins.append(bins.pop(small))
        elif len(bins[-1][1]) > 1:
            load, part = bins.pop()
            last = next(row for row in beyond.order[::-1].tolist() if row in part)
            bins += [(load, [row for row in part if row != last]), (int(beyond.each[last]), [last])]
    return [(load + of_prefix, part) for load, part in bins]


def assign(costs: RowCosts, processes: int) -> list[list[int]]:
    """
    Give each process equally many rows, with token sums as even as that allows. Returns the rows of each, ascending.

    Rows of one group go to one process; where no process has room for all of them, to as few as it takes.

    Raises:
        ValueError: If the number of rows is no multiple of `processes`.
    """
    if len(costs) % processes:
        raise ValueError(f"{len(costs)} rows cannot be dealt out evenly to {processes} processes.")
    room = np.full(processes, len(costs) // processes)
    load = np.zeros(processes)
    parts: list[list[int]] = [[] for _ in range(processes)]
    costs = costs.without_common(costs.common_to_all)
    for rows, size in sorted(_groups(costs), key=lambda group: -group[1]):
        whole = len(rows)
        while rows:
            # The lightest process with room for all; else the lightest with any.
            fits = room >= len(rows)
            at = int(np.where(fits if fits.any() else room > 0, load, np.inf).argmin())
            now, rows = rows[: room[at]], rows[room[at] :]
            parts[at] += now
            room[at] -= len(now)
            load[at] += size if len(now) == whole else costs.total(now)
    return [sorted(part) for part in parts]


def balance(costs: RowCosts, processes: int) -> list[list[int]]:
    """
    Give the processes about equally many tokens, however many rows that is. Returns the rows of each, at least one.

    Groups are dealt out whole or cut more and more finely, and all rows are cut where they have little in common; of
    these ways that one is taken in which the fullest process has the fewest tokens.
    """
    costs = costs.without_common(costs.common_to_all)
    even = (costs.each.sum() - costs.common.sum()) / processes
    dealt = [_evenly(_units(costs, int(even / cuts)), processes) for cuts in (1, 2, 4, 8)]
    found = [[[row for _, rows in part for row in rows] for part in parts] for parts in dealt]
    found.append(_along_beginnings(costs, processes))
    # Rows that are all alike add no tokens to the first one, so the other ways give them all to one process.
    found.append([part.tolist() for part in np.array_split(costs.order, processes)])
    return min(filter(all, found), key=lambda parts: max(map(costs.total, parts)))


def _along_beginnings(costs: RowCosts, processes: int) -> list[list[int]]:
    """The sorted rows, cut into parts of neighbours so that the part with the most tokens has few."""
    each, common = costs.each[costs.order].tolist(), costs.common.tolist()

    def cuts(most: int) -> list[int]:
        found, load = [0], 0
        for at, (tokens, shared) in enumerate(zip(each, common, strict=True)):
            added = tokens - (shared if at > found[-1] else 0)
            if at > found[-1] and load + added > most:
                found.append(at)
                load, added = 0, tokens
            load += added
        return found

    low, high = max(max(each), (sum(each) - sum(common)) // processes), sum(each)
    while low < high - high // 100:  # to a percent
        middle = (low + high) // 2
        low, high = (low, middle) if len(cuts(middle)) <= processes else (middle + 1, high)
    parts = np.split(costs.order, cuts(high)[1:])
    return [part.tolist() for part in parts] + [[] for _ in range(processes - len(parts))]


@dataclass(frozen=True)
class StepPlan:
    """
    How TRL divides an epoch into optimizer steps: micro-batches, dealt out to the processes in turn.

    Attributes:
        rows (`int`): Rows of the dataset.
        micro_batch (`int`): Rows of a micro-batch.
        accumulated (`int`): Micro-batches of each process in an optimizer step.
        processes (`int`): How many processes.
        drop_last (`bool`): Whether micro-batches that not every process has, or that are not full, are left out.
    """

    rows: int
    micro_batch: int
    accumulated: int = 1
    processes: int = 1
    drop_last: bool = False

    @property
    def per_process(self) -> int:
        """Rows of each process in a full step."""
        return self.micro_batch * self.accumulated

    @property
    def remainder(self) -> int:
        """Rows of the dataset in a last step that is not full, over all processes."""
        rest = self.rows % (self.per_process * self.processes)
        return rest - rest % (self.micro_batch * self.processes) if self.drop_last else rest

    @property
    def last(self) -> int:
        """Rows of each process in a last step that is not full; 0 if all steps are full."""
        if self.processes == 1:
            return self.remainder
        # Several processes have equally many full micro-batches: accelerate repeats the first rows of the epoch.
        return -(-self.remainder // (self.micro_batch * self.processes)) * self.micro_batch

    def weights(self, rows: int, of_step: int | None = None) -> np.ndarray:
        """
        Weight of each of a process's rows in the loss of a step.

        TRL averages the means of its micro-batches. Several processes have equally many full ones, and the gradients
        of their losses are averaged: each of the `of_step` rows weighs as much as every other.
        """
        if self.processes > 1:
            return np.full(rows, self.processes / (of_step or rows * self.processes))
        micro_batches = np.arange(rows) // self.micro_batch
        return 1 / np.bincount(micro_batches)[micro_batches] / (micro_batches[-1] + 1)

    def shares(
        self, order: Sequence[int] | np.ndarray, costs: RowCosts, *, equal: bool = False
    ) -> Iterator[tuple[int, list[int]]]:
        """
        The rows of an epoch, dealt out to the processes: how many rows a step has and which of them a process has.

        Rows change places only within their step of the given `order`. With `equal` all processes have equally many
        rows, and not only about equally many tokens.
        """
        order, size = np.asarray(order), self.per_process * self.processes
        for begin in range(0, len(order), size):
            step = order[begin : begin + size]
            if len(step) < size:
                step = step[: self.remainder]
                # What accelerate makes of it: the first rows of the epoch come again.
                missing = self.last * self.processes - len(step)
                step = np.concatenate([step, np.resize(order[: self.micro_batch * self.processes], missing)])
            if len(step) and self.processes == 1:
                yield len(step), step.tolist()
            elif len(step):
                parts = (assign if equal else balance)(costs[step], self.processes)
                yield from ((len(step), step[part].tolist()) for part in parts)

    def in_micro_batches(self, order: Sequence[int] | np.ndarray, costs: RowCosts) -> Iterator[int]:
        """
        The rows of an epoch in the order in which accelerate deals them out to the processes, in micro-batches.

        Rows change places only within their step, so that its micro-batches have even work and rows that begin alike
        are in one of them. Those that run at one time have about equally many tokens.
        """
        order, size = np.asarray(order), self.per_process * self.processes
        for begin in range(0, len(order), size):
            step = order[begin : begin + size]
            if len(step) < size or self.accumulated * self.processes == 1:
                yield from step.tolist()
                continue
            of_step = costs[step]
            parts = assign(of_step, self.accumulated * self.processes)
            for part in sorted(parts, key=of_step.total, reverse=True):
                yield from step[part].tolist()

    def __len__(self) -> int:
        """Shares of an epoch, over all processes."""
        return self.processes * (self.rows // (self.per_process * self.processes) + bool(self.last))


def _groups(costs: RowCosts) -> list[tuple[list[int], int]]:
    """The rows of each group (see [`RowCosts.joined`]), and their tokens in one batch."""
    if not len(costs):
        return []
    first = np.flatnonzero(~costs.joined)
    tokens = costs.each[costs.order] - np.where(costs.joined, costs.common, 0)
    parts = np.split(costs.order, first[1:])
    return [(part.tolist(), int(size)) for part, size in zip(parts, np.add.reduceat(tokens, first), strict=True)]


def _units(costs: RowCosts, most: int) -> list[Unit]:
    """The groups, those of more than `most` tokens in pieces; the largest first."""
    units: list[Unit] = []
    for rows, size in _groups(costs):
        units += [(size, rows)] if size <= most else [(costs.total(p), p) for p in _pieces(costs, rows, most)]
    return sorted(units, key=lambda unit: unit[0], reverse=True)


def _evenly(units: list[Unit], parts: int) -> list[list[Unit]]:
    """Give each of the units, in their order, to the part with the fewest tokens so far."""
    dealt: list[list[Unit]] = [[] for _ in range(parts)]
    loads = [(0, at) for at in range(parts)]
    for unit in units:
        load, at = loads[0]
        dealt[at].append(unit)
        heapq.heapreplace(loads, (load + unit[0], at))
    return dealt


def _tokens(units: list[Unit]) -> float:
    return sum(size for size, _ in units)


def _pieces(costs: RowCosts, rows: list[int], budget: int) -> Iterator[list[int]]:
    """The rows of one group, in pieces of at most `budget` tokens, or of one row."""
    inner = costs[rows]
    piece: list[int] = []
    tokens = 0
    for at, common in zip(inner.order.tolist(), inner.common.tolist(), strict=True):
        each = int(inner.each[at])
        if piece and tokens + each - common > budget:
            yield piece
            piece, tokens, common = [], 0, 0
        piece.append(rows[at])
        tokens += each - common
    yield piece
