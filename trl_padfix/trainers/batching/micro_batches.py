"""An optimizer step as a batch of the data loader: its micro-batches, their weights, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.shared_prefixes import plan_shared_prefixes
from ..data.batch_metadata import image_tensors, pop_metadata, scored
from .bin_packing import StepPlan, pack_depth_first, split
from .measures import RowMeasure
from .prefix_schedule import ids_and_masks


__all__ = ["MICRO_BATCHES", "ONCE", "WEIGHTS", "BudgetCollator", "Piece", "halved", "pieces_of"]

MICRO_BATCHES, WEIGHTS, ONCE = "micro_batches", "weights", "once"
"""Keys of a batch that is a list of micro-batches, of their weights in the step, and of what they have in common."""


Piece = tuple[dict[str, Any], float]
"""A micro-batch and its weight."""


@dataclass
class BudgetCollator:
    """
    Splits what a process has of a step into micro-batches, and collates each.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        measure ([`RowMeasure`]):
            What examples cost.
        budget (`int`):
            Most tokens of a micro-batch.
        plan ([`StepPlan`]):
            The micro-batches of TRL, by which rows weigh.
        whole (`bool`, *optional*, defaults to `False`):
            Whether all rows stay in one batch, whose forwards are split.
        by_tokens (`bool`, *optional*, defaults to `False`):
            Whether micro-batches weigh by their trained tokens, and not by their rows.
        once (`bool`, *optional*, defaults to `False`):
            Whether prefixes that micro-batches have in common are computed once in the step.
        plans (`bool`, *optional*, defaults to `False`):
            Whether how that is done is planned here.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: RowMeasure
    budget: int
    plan: StepPlan
    whole: bool = False
    by_tokens: bool = False
    once: bool = False
    plans: bool = False

    def __call__(self, shares: list[tuple[int, list[int], list[dict[str, Any]]]]) -> dict[str, Any]:
        ((rows_of_step, numbers, examples),) = shares
        if self.whole:
            return {MICRO_BATCHES: [self.collator(examples)], WEIGHTS: [1.0]}
        costs, weights = self.measure.of(numbers, examples), self.plan.weights(len(examples), rows_of_step)
        # Rows of one micro-batch have one weight: those of a last micro-batch with fewer rows are split by themselves.
        alike = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        into = pack_depth_first if self.once else split
        parts = [rows[part].tolist() for rows in alike for part in into(costs[rows], self.budget)]
        batches = [self.collator([examples[i] for i in rows]) for rows in parts]
        for rows, batch in zip(parts, batches, strict=True):
            self.measure.check([numbers[i] for i in rows], batch)
        of_step: dict[str, Any] = {MICRO_BATCHES: batches}
        if self.by_tokens:
            counts = [0 if (found := scored(batch)) is None else len(found) for batch in batches]
            of_step[WEIGHTS] = [count / max(sum(counts), 1) for count in counts]
        else:
            of_step[WEIGHTS] = [float(weights[rows].sum()) for rows in parts]
        if self.plans and len(batches) > 1:
            planned = plan_shared_prefixes(ids_and_masks(batches), self.budget)
            of_step[ONCE] = planned and FlatIndexMaps.of(planned)
        return of_step


def pieces_of(batch: Any) -> list[Any]:
    """The micro-batches of a batch of the data loader; the batch itself where it is not split."""
    return batch[MICRO_BATCHES] if isinstance(batch, Mapping) and MICRO_BATCHES in batch else [batch]


def halved(pieces: list[Piece], count: int, rows_per_item: int) -> list[Piece]:
    """
    `count` micro-batches, as many as the process with the most of them has.

    The largest are cut in two. Where none has two rows, or all have images, which have no row for each row, the one
    with the fewest rows comes again without a weight.
    """
    pieces = list(pieces)
    while len(pieces) < count:
        items = [1 if image_tensors(batch) else len(batch["input_ids"]) // rows_per_item for batch, _ in pieces]
        at = max(range(len(pieces)), key=items.__getitem__)
        (batch, weight), n, middle = pieces[at], items[at], items[at] // 2
        if not middle:
            smallest, _ = min(pieces, key=lambda piece: len(piece[0]["input_ids"]))
            pieces.append((smallest, 0.0))
            continue
        batch, _ = pop_metadata(batch)
        pieces[at : at + 1] = [
            (_selected(batch, part, n), weight * len(part) / n) for part in (range(middle), range(middle, n))
        ]
    return pieces


def _selected(batch: dict[str, Any], items: Sequence[int], count: int) -> dict[str, Any]:
    """Some of the `count` items of a batch, whose columns have a row for each item or several times as many."""
    return {name: torch.cat([rows[list(items)] for rows in value.split(count)]) for name, value in batch.items()}
