"""
The optimizer steps of an epoch in TRL, and the rows that each process gets of them.

All functions are pure, so every process finds the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .bin_packing import partition_by_tokens, partition_equal_rows
from .token_costs import RowCosts


__all__ = ["Share", "StepPlan"]


class Share(NamedTuple):
    """
    The rows of a process in a step.

    Attributes:
        rows_of_step (`int`): Number of rows of the step, over all processes.
        rows (`list[int]`): Numbers of the rows.
        trl_index (`list[int]`): For each row the number of TRL's micro-batch that it is in; the processes compute
            theirs at the same time, under one number.
    """

    rows_of_step: int
    rows: list[int]
    trl_index: list[int]


@dataclass(frozen=True)
class StepPlan:
    """
    The optimizer steps of an epoch in TRL: micro-batches, which the processes take in turn.

    Attributes:
        rows (`int`): Rows of the dataset.
        micro_batch (`int`): Rows of a micro-batch.
        accumulation_steps (`int`): Micro-batches of each process in an optimizer step.
        processes (`int`): Number of processes.
        drop_last (`bool`): Whether micro-batches that are not full, or that some process lacks, are left out.
    """

    rows: int
    micro_batch: int
    accumulation_steps: int = 1
    processes: int = 1
    drop_last: bool = False

    @property
    def per_process(self) -> int:
        """Rows of each process in a full step."""
        return self.micro_batch * self.accumulation_steps

    @property
    def per_step(self) -> int:
        """Rows of a full step, over all processes."""
        return self.per_process * self.processes

    @property
    def per_round(self) -> int:
        """Rows that the processes compute at the same time: a micro-batch each."""
        return self.micro_batch * self.processes

    @property
    def remainder(self) -> int:
        """Rows of the dataset in a last, incomplete step, over all processes."""
        rest = self.rows % self.per_step
        return rest - rest % self.per_round if self.drop_last else rest

    @property
    def last(self) -> int:
        """Rows of each process in a last, incomplete step; 0 if all steps are full."""
        if self.processes == 1:
            return self.remainder
        # accelerate repeats the first rows of the epoch, so that all processes have equally many full micro-batches.
        return -(-self.remainder // self.per_round) * self.micro_batch

    def weights(self, rows: int, rows_of_step: int) -> np.ndarray:
        """
        Weight of each of the `rows` of a process in the loss of a step, `(rows,)`.

        TRL averages over micro-batches their means over rows. With several processes all micro-batches are full and
        gradients are averaged over processes, so each of the `rows_of_step` has the same weight.
        """
        if self.processes > 1:
            return np.full(rows, self.processes / rows_of_step)
        micro_batch = np.arange(rows) // self.micro_batch
        rows_in = np.bincount(micro_batch)
        return 1 / rows_in[micro_batch] / len(rows_in)

    def rows_per_process(
        self, order: Sequence[int] | np.ndarray, costs: RowCosts, *, equal: bool = False
    ) -> Iterator[Share]:
        """
        Partition the rows of an epoch: yields the share of each process of each step.

        Each row stays in its step of `order`. With `equal` each process has the micro-batches that it has in TRL, for
        losses that compare the rows of one; otherwise processes have about equally many tokens.
        """
        order, size = np.asarray(order), self.per_step
        for begin in range(0, len(order), size):
            step = order[begin : begin + size]
            if len(step) < size:
                step = step[: self.remainder]
                # As in accelerate, the first rows of the epoch fill the last step.
                missing = self.last * self.processes - len(step)
                step = np.concatenate([step, np.resize(order[: self.per_round], missing)])
            if not len(step):
                continue
            # accelerate gives the first micro-batches of a step to one process each, then the second ones, ...
            trl_index, process = divmod(np.arange(len(step)) // self.micro_batch, self.processes)
            if equal or self.processes == 1:
                partition = [np.flatnonzero(process == i).tolist() for i in range(self.processes)]
            else:
                partition = partition_by_tokens(costs[step], self.processes)
            yield from (Share(len(step), step[rows].tolist(), trl_index[rows].tolist()) for rows in partition)

    def order_by_micro_batch(self, order: Sequence[int] | np.ndarray, costs: RowCosts) -> Iterator[int]:
        """
        The rows of an epoch in the order in which accelerate distributes them to the processes, in micro-batches.

        Each row stays in its step. Micro-batches of a step have even token counts, and rows with a shared prefix are
        in one of them. Sorted by tokens, micro-batches that run at the same time have about equally many.
        """
        order, size = np.asarray(order), self.per_step
        for begin in range(0, len(order), size):
            step = order[begin : begin + size]
            if len(step) < size or self.accumulation_steps * self.processes == 1:
                yield from step.tolist()
                continue
            step_costs = costs[step]
            micro_batches = partition_equal_rows(step_costs, self.accumulation_steps * self.processes)
            for rows in sorted(micro_batches, key=step_costs.total, reverse=True):
                yield from step[rows].tolist()

    def share_of_epoch(self, steps: int) -> float:
        """Share of an epoch after its first `steps` steps: of its micro-batches, as transformers counts it."""
        full = self.rows // self.per_step * self.accumulation_steps
        count = full - -self.last // self.micro_batch  # -(-a // b) rounds up
        return min(steps * self.accumulation_steps, count) / count

    def __len__(self) -> int:
        """Number of items of [`rows_per_process`] in an epoch."""
        return self.processes * (self.rows // self.per_step + bool(self.last))
