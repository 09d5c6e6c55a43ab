"""An optimizer step as a batch of the data loader: its micro-batches, their weights, and their shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.errors import PaddingRemovalError
from ..data.batch_metadata import image_tensors, label_positions, pop_metadata, rows_with_labels_of_padding
from .bin_packing import StepPlan, halve_largest, pack_by_budget, pack_depth_first
from .measures import RowMeasure
from .prefix_schedule import ids_and_masks, plan_on_host


__all__ = [
    "MICRO_BATCHES",
    "PREFIX_PLAN",
    "WEIGHTS",
    "BudgetCollator",
    "MicroBatch",
    "micro_batches_of",
    "to_equal_count",
]

MICRO_BATCHES, WEIGHTS, PREFIX_PLAN = "micro_batches", "weights", "prefix_plan"
"""Keys of a batch of the data loader: its micro-batches, their weights in the step, the plan of shared prefixes."""


MicroBatch = tuple[dict[str, Any], float]
"""A micro-batch and its weight."""


@dataclass
class BudgetCollator:
    """
    Splits the rows that a process has of a step into micro-batches, and collates each.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        measure ([`RowMeasure`]):
            Counts the tokens of examples.
        budget (`int`):
            Most tokens of a micro-batch.
        plan ([`StepPlan`]):
            The micro-batches of TRL, from which rows have their weights.
        one_batch (`bool`, *optional*, defaults to `False`):
            Whether all rows stay in one batch, whose forwards are split later.
        weight_by_tokens (`bool`, *optional*, defaults to `False`):
            Whether the weight of a micro-batch is its share of trained tokens, and not of rows.
        share_across_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether prefixes that micro-batches have in common are computed once in the step.
        plan_in_worker (`bool`, *optional*, defaults to `False`):
            Whether these prefixes are planned here, in the data loader worker.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: RowMeasure
    budget: int
    plan: StepPlan
    one_batch: bool = False
    weight_by_tokens: bool = False
    share_across_micro_batches: bool = False
    plan_in_worker: bool = False

    def __call__(self, shares: list[tuple[int, list[int], list[dict[str, Any]]]]) -> dict[str, Any]:
        ((rows_of_step, numbers, examples),) = shares
        if self.one_batch:
            return {MICRO_BATCHES: [self.collator(examples)], WEIGHTS: [1.0]}
        costs, weights = self.measure.of(numbers, examples), self.plan.weights(len(examples), rows_of_step)
        # A micro-batch has one weight for all its rows: rows of a last, smaller micro-batch of TRL are not mixed with
        # the others.
        same_weight = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        pack = pack_depth_first if self.share_across_micro_batches else pack_by_budget
        parts = [rows[part].tolist() for rows in same_weight for part in pack(costs[rows], self.budget)]
        batches = [self.collator([examples[i] for i in rows]) for rows in parts]
        for rows, batch in zip(parts, batches, strict=True):
            _refuse_labels_of_padding(batch, [numbers[i] for i in rows])
            self.measure.check([numbers[i] for i in rows], batch)
        step: dict[str, Any] = {MICRO_BATCHES: batches}
        if self.weight_by_tokens:
            positions = [label_positions(batch) for batch in batches]
            counts = [0 if labels is None else len(labels) for labels in positions]
            step[WEIGHTS] = [count / max(sum(counts), 1) for count in counts]
        else:
            step[WEIGHTS] = [float(weights[rows].sum()) for rows in parts]
        if self.plan_in_worker and len(batches) > 1:
            step[PREFIX_PLAN] = plan_on_host(ids_and_masks(batches), self.budget)
        return step


def _refuse_labels_of_padding(batch: dict[str, Any], numbers: list[int]) -> None:
    """
    Raise a [`PaddingRemovalError`] if padding of a micro-batch has labels: rows are padded to other lengths in it than
    in the batch of TRL, so the loss would be another one. `numbers` are those of the items in the dataset.
    """
    rows = rows_with_labels_of_padding(batch)
    if rows:
        raise PaddingRemovalError(
            f"Padding has labels in rows {sorted({numbers[row % len(numbers)] for row in rows})} of the dataset, and "
            "`max_tokens_per_batch` pads rows to other lengths than TRL: the loss would depend on it. Let your "
            "collator set labels to -100 where the attention mask is 0, or leave the budget out."
        )


def micro_batches_of(batch: Any) -> list[Any]:
    """The micro-batches of a batch of the data loader, or the batch itself if it is not split."""
    return batch[MICRO_BATCHES] if isinstance(batch, Mapping) and MICRO_BATCHES in batch else [batch]


def to_equal_count(micro_batches: list[MicroBatch], count: int, rows_per_item: int) -> list[MicroBatch]:
    """
    Cut the largest micro-batches in two until there are `count`, the most that any process has.

    Batches with images are not cut, because images are not numbered by row. Where nothing is left to cut, the
    micro-batch with the fewest rows is repeated with weight 0.
    """
    sizes = [1 if image_tensors(batch) else len(batch["input_ids"]) // rows_per_item for batch, _ in micro_batches]
    result: list[MicroBatch] = []
    for origin, items in halve_largest([range(size) for size in sizes], count):
        (batch, weight), size = micro_batches[origin], sizes[origin]
        if len(items) < size:
            batch, weight = _items_of(pop_metadata(batch)[0], items, size), weight * len(items) / size
        result.append((batch, weight))
    smallest, _ = min(result, key=lambda micro_batch: len(micro_batch[0]["input_ids"]))
    return result + [(smallest, 0.0)] * (count - len(result))


def _items_of(batch: dict[str, Any], items: Sequence[int], count: int) -> dict[str, Any]:
    """Some of the `count` items of a batch. A column has one row for each item, or several blocks of such rows."""
    return {name: torch.cat([rows[list(items)] for rows in value.split(count)]) for name, value in batch.items()}
