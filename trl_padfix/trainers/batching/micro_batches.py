"""An optimizer step as a batch of the data loader: its micro-batches, their weights, and their shared prefixes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...core.call.batch_metadata import PooledTokens
from ...core.errors import PaddingRemovalError
from ..data.batch_metadata import (
    LayoutCollator,
    image_tensors,
    label_positions,
    pop_metadata,
    rows_with_labels_of_padding,
)
from .bin_packing import StepPlan, halve_largest, pack_by_budget, pack_depth_first
from .measures import RowMeasure, batch_costs
from .prefix_schedule import ids_and_masks, plan_on_host
from .token_costs import RowCosts


__all__ = [
    "KEPT",
    "MICRO_BATCHES",
    "PREFIX_PLAN",
    "WEIGHTS",
    "BudgetCollator",
    "MicroBatch",
    "micro_batches_of",
    "to_equal_count",
]

logger = logging.getLogger(__name__)  # a worker of a data loader has none of accelerate's state

MICRO_BATCHES, WEIGHTS, PREFIX_PLAN, KEPT = "micro_batches", "weights", "prefix_plan", "kept_micro_batches"
"""
Keys of a batch of the data loader: its micro-batches, their weights in the step, the plan of shared prefixes, and
whether the micro-batches are those of TRL.
"""


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
        keeps_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether micro-batches are those of TRL, because the loss compares their rows. Their forwards are split
            later.
        weight_by_tokens (`bool`, *optional*, defaults to `False`):
            Whether the weight of a micro-batch is its share of trained tokens, and not of rows.
        share_across_micro_batches (`bool`, *optional*, defaults to `False`):
            Whether prefixes that micro-batches have in common are computed once in the step.
        plan_in_worker (`bool`, *optional*, defaults to `False`):
            Whether these prefixes are planned here, in the data loader worker.
        rows_per_item (`int`, *optional*):
            For a collator that may look at its whole batch (a user's): rows of a batch that belong together. It then
            gets the micro-batches of TRL, and what it makes of them is split by rows.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: RowMeasure
    budget: int
    plan: StepPlan
    keeps_micro_batches: bool = False
    weight_by_tokens: bool = False
    share_across_micro_batches: bool = False
    plan_in_worker: bool = False
    rows_per_item: int | None = None

    def __call__(self, shares: list[tuple[int, list[int], list[dict[str, Any]]]]) -> dict[str, Any]:
        ((rows_of_step, numbers, examples),) = shares
        if self.keeps_micro_batches:
            size = self.plan.micro_batch
            batches = [self.collator(examples[begin : begin + size]) for begin in range(0, len(examples), size)]
            return {MICRO_BATCHES: batches, WEIGHTS: [1 / len(batches)] * len(batches), KEPT: True}
        weights = self.plan.weights(len(examples), rows_of_step)
        if self.rows_per_item is None:
            batches, shares_of_step = self._planned(numbers, examples, weights)
        else:
            batches, shares_of_step = self._cut(examples, weights, self.rows_per_item)
        step: dict[str, Any] = {MICRO_BATCHES: batches, WEIGHTS: shares_of_step}
        if self.weight_by_tokens:
            positions = [label_positions(batch) for batch in batches]
            counts = [0 if labels is None else len(labels) for labels in positions]
            step[WEIGHTS] = [count / max(sum(counts), 1) for count in counts]
        if self.plan_in_worker and len(batches) > 1:
            step[PREFIX_PLAN] = plan_on_host(ids_and_masks(batches), self.budget)
        return step

    @property
    def _pack(self) -> Callable[[RowCosts, int], list[list[int]]]:
        return pack_depth_first if self.share_across_micro_batches else pack_by_budget

    def _planned(
        self, numbers: list[int], examples: list[dict[str, Any]], weights: np.ndarray
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Micro-batches of examples by their tokens, and their weights."""
        costs = self.measure.of(numbers, examples)
        # A micro-batch has one weight for all its rows: rows of a last, smaller micro-batch of TRL are not mixed with
        # the others.
        same_weight = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        parts = [rows[part].tolist() for rows in same_weight for part in self._pack(costs[rows], self.budget)]
        batches = [self.collator([examples[i] for i in rows]) for rows in parts]
        for rows, batch in zip(parts, batches, strict=True):
            self._refuse_use_of_padding(batch, [numbers[i] for i in rows])
            self.measure.check([numbers[i] for i in rows], batch)
        return batches, [float(weights[rows].sum()) for rows in parts]

    def _cut(
        self, examples: list[dict[str, Any]], weights: np.ndarray, rows_per_item: int
    ) -> tuple[list[dict[str, Any]], list[float]]:
        """Micro-batches of what a user's collator makes of the micro-batches of TRL, and their weights."""
        result: list[dict[str, Any]] = []
        result_weights: list[float] = []
        for begin in range(0, len(examples), self.plan.micro_batch):
            rows = slice(begin, begin + self.plan.micro_batch)
            batch, weight = self.collator(examples[rows]), float(weights[rows].sum())
            plain = pop_metadata(batch)[0]
            # The collator may have dropped rows or added some: the loss is a mean over what it returned.
            count = len(plain["input_ids"]) // rows_per_item
            if any(not isinstance(v, torch.Tensor) or v.dim() == 0 or len(v) % count for v in plain.values()):
                logger.warning(
                    f"`max_tokens_per_batch`: the collator makes a batch with values that do not have a row for each "
                    f"of its {count} rows ({', '.join(plain)}), so it is computed as one, whatever its tokens."
                )
                result.append(batch)
                result_weights.append(weight)
                continue
            ids = plain["input_ids"]
            costs = batch_costs(
                ids, plain.get("attention_mask", torch.ones_like(ids)), rows_per_item, self.measure.sharing
            )
            parts = self._pack(costs, self.budget)
            result += [batch] if len(parts) == 1 else [self._relaid(_items_of(plain, part, count)) for part in parts]
            result_weights += [weight * len(part) / count for part in parts]
        return result, result_weights

    def _refuse_use_of_padding(self, batch: dict[str, Any], numbers: list[int]) -> None:
        """
        Raise a [`PaddingRemovalError`] if padding of a micro-batch has labels, or is what a sequence classifier scores:
        rows are padded to other lengths in it than in the batch of TRL, so the loss would be another one. `numbers` are
        those of the items in the dataset.
        """
        what = "has labels", "Let your collator set labels to -100 where the attention mask is 0"
        rows = rows_with_labels_of_padding(batch)
        pad = self.collator.pooling_pad_id if isinstance(self.collator, LayoutCollator) else None
        if pad is not None and "attention_mask" in batch:
            is_scored = PooledTokens.of(batch["input_ids"], batch["attention_mask"], pad).is_padding
            if scored := [row for row, is_padding in enumerate(is_scored) if is_padding]:
                rows, what = scored, ("is scored", f"Let your collator pad with the model's `pad_token_id={pad}`")
        if rows:
            raise PaddingRemovalError(
                f"Padding {what[0]} in rows {sorted({numbers[row % len(numbers)] for row in rows})} of the dataset, "
                "and `max_tokens_per_batch` pads rows to other lengths than TRL: the loss would depend on it. "
                f"{what[1]}, or leave the budget out."
            )

    def _relaid(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch with the metadata that the collator adds, if it does."""
        is_laid = isinstance(self.collator, LayoutCollator)
        return replace(self.collator, collator=lambda _: batch)([]) if is_laid else batch


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
