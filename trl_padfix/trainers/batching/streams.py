"""Streamed train datasets: rows with shared prefixes in one step, and the steps of a token budget."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from .budget_checks import check_budget
from .measures import RowMeasure
from .prefix_groups import group_rows
from .step_plan import StepPlan
from .token_costs import RowCosts


__all__ = ["GroupedStream", "StepStream"]


class GroupedStream(IterableDataset):
    """
    A stream that reads `buffer` rows ahead, and brings rows with a shared prefix into one step of `plan`.
    """

    def __init__(self, rows: Any, measure: RowMeasure, plan: StepPlan, buffer: int):
        self.rows, self.measure, self.plan, self.buffer = rows, measure, plan, buffer

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        plan = self.plan
        if worker is not None and worker.num_workers > 1:
            # Workers make batches in turns, each from other rows, so a step is never in one worker.
            plan = StepPlan(0, plan.micro_batch)
        size = plan.per_step
        buffer = max(self.buffer // size, 1) * size  # a buffer ends where a step does
        stream = iter(self.rows)
        while rows := list(islice(stream, buffer)):
            costs = self.measure.costs(rows)
            yield from (rows[i] for i in plan.order_by_micro_batch(group_rows(range(len(rows)), costs, size), costs))


class StepStream(GroupedStream):
    """
    A stream whose items are the rows of a step, as those of [`StepDataset`] are. It reads a step ahead, or
    `buffer` rows if these are grouped.

    Args:
        budget (`int`):
            Most tokens of a sequence. A row beyond it is an error as soon as it is read.
        columns (`set[str]`, *optional*):
            Columns that the collator gets; by default all.
    """

    def __init__(
        self, rows: Any, measure: RowMeasure, plan: StepPlan, buffer: int | None, budget: int, columns: set[str] | None
    ):
        super().__init__(rows, measure, plan, buffer or plan.per_step)
        self.is_grouped, self.budget, self.columns = buffer is not None, budget, columns
        self.has_warned = False

    def __iter__(self) -> Iterator[Any]:
        plan, size = self.plan, self.plan.per_step
        first, first_rows = 0, []
        stream = iter(self.rows)
        # A buffer ends where a step does: only the last one may hold an incomplete step.
        while rows := list(islice(stream, self.buffer // size * size)):
            check_budget(self.measure.longest(rows), self.budget, first)
            first_rows = first_rows or rows[: plan.per_round]
            numbers = [*range(first, first + len(rows))]
            if first and plan.processes > 1 and not plan.drop_last:
                # As accelerate, which fills the last round of micro-batches with the first rows of the stream.
                missing = -len(rows) % plan.per_round
                filling = np.resize(np.arange(len(first_rows)), missing).tolist()
                rows, numbers = rows + [first_rows[i] for i in filling], numbers + filling
            costs = self.measure.costs(rows)
            self._warn_of_large(costs, first)
            order: Any = range(len(rows))
            if self.is_grouped:
                order = group_rows(order, costs, size)
            if self.columns is not None:
                rows = [{k: v for k, v in row.items() if k in self.columns} for row in rows]
            for share in replace(plan, rows=len(rows)).rows_per_process(order, costs):
                yield share._replace(rows=[numbers[i] for i in share.rows]), [rows[i] for i in share.rows]
            first += len(rows)

    def _warn_of_large(self, costs: RowCosts, first: int) -> None:
        """Warn once of a row whose sequences fit one by one, and not together."""
        if self.has_warned or not (costs.tokens > self.budget).any():
            return
        self.has_warned, row = True, int((costs.tokens > self.budget).argmax())
        # Not accelerate's logger: a worker of a data loader has none of its state.
        logging.getLogger(__name__).warning(
            f"Row {first + row} of the train stream has {costs.tokens[row]} tokens, more than "
            f"`max_tokens_per_batch={self.budget}`: it is a micro-batch by itself, and needs the memory of its size. "
            "Raise the budget, or lower `max_length`. Said once."
        )
