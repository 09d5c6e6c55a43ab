"""The collator under a token budget: it splits the rows that a process has of a step into micro-batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.errors import PaddingRemovalError
from ..data.batch_labels import scores_padding
from ..data.image_rows import image_tensors
from .bin_packing import pack_by_budget, pack_depth_first, split_by_length
from .measures import RowMeasure, batch_costs
from .micro_batches import CollatedStep, MicroBatch
from .prefix_schedule import ids_and_masks, plan_on_host
from .step_plan import Share, StepPlan
from .token_costs import RowCosts


__all__ = ["BudgetCollator"]

logger = logging.getLogger(__name__)  # a worker of a data loader has none of accelerate's state


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
            Whether the shared prefixes of micro-batches are computed once in the step.
        plan_in_worker (`bool`, *optional*, defaults to `False`):
            Whether these prefixes are planned here, in the data loader worker.
        cuts_batches (`bool`, *optional*, defaults to `False`):
            Whether the collator is a user's, whose output for a row may depend on the other rows. It then gets the
            micro-batches of TRL, and the batches that it returns are split by rows.
        rows_per_item (`int`, *optional*, defaults to 1):
            Rows of a batch that belong together.
        pad_token_id (`int`, *optional*, defaults to 0):
            Padding of the ids, for the batch that a user's code reads.
        adds_whole (`bool`, *optional*, defaults to `False`):
            Whether a step with images also has the batch of TRL, because a user's code may read it.
        cp_size (`int`, *optional*, defaults to 1):
            Number of processes that compute a packed row together.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: RowMeasure
    budget: int
    plan: StepPlan
    keeps_micro_batches: bool = False
    weight_by_tokens: bool = False
    share_across_micro_batches: bool = False
    plan_in_worker: bool = False
    cuts_batches: bool = False
    rows_per_item: int = 1
    pad_token_id: int = 0
    adds_whole: bool = False
    cp_size: int = 1

    def __call__(self, shares: list[tuple[Share, list[dict[str, Any]]]]) -> CollatedStep:
        ((share, examples),) = shares  # one item of the dataset is a step
        weights = self.plan.weights(len(examples), share.rows_of_step)
        step = CollatedStep([], self.rows_per_item, self.pad_token_id, self.keeps_micro_batches)
        if self.keeps_micro_batches or self.cuts_batches:
            trl_batches = self._micro_batches_of_trl(examples, weights)
            step = step._replace(micro_batches=trl_batches, trl_sizes=[len(m.items) for m in trl_batches])
            if self.keeps_micro_batches:
                return step
            step = step._replace(micro_batches=[part for m in trl_batches for part in self._split_by_rows(m)])
        else:
            step = self._split_by_tokens(step, share, examples, weights)
        if self.weight_by_tokens:
            counts = [int((m.batch["labels"][:, 1:] != -100).sum()) for m in step.micro_batches]
            total = max(sum(counts), 1)
            weighted = zip(step.micro_batches, counts, strict=True)
            step = step._replace(micro_batches=[m._replace(weight=count / total) for m, count in weighted])
        batches = [m.batch for m in step.micro_batches]
        if self.adds_whole and len(batches) > 1 and any(map(image_tensors, batches)):
            step = step._replace(whole=self.collator(examples))
        if self.plan_in_worker and len(batches) > 1 and (inputs := ids_and_masks(batches)):
            step = step._replace(prefix_plan=plan_on_host(inputs, self.budget))
        return step

    def _micro_batches_of_trl(self, examples: list[dict[str, Any]], weights: np.ndarray) -> list[MicroBatch]:
        """The collated micro-batches of TRL. Items are counted: a user's collator may drop rows or add some."""
        result: list[MicroBatch] = []
        count = 0
        for begin in range(0, len(examples), self.plan.micro_batch):
            rows = slice(begin, begin + self.plan.micro_batch)
            batch = self.collator(examples[rows])
            items = range(count, count + self._count(batch))
            result.append(MicroBatch(batch, float(weights[rows].sum()), items))
            count = items.stop
        return result

    def _split_by_rows(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """Split a micro-batch of TRL by rows. The loss is a mean over the rows that the collator returned."""
        plain, count = micro_batch.batch, len(micro_batch.items)
        if any(not isinstance(v, torch.Tensor) or v.dim() == 0 or len(v) % count for v in plain.values()):
            logger.warning(
                f"`max_tokens_per_batch`: the collator makes a batch with values that do not have a row for each "
                f"of its {count} rows ({', '.join(plain)}), so it is computed as one, whatever its tokens."
            )
            return [micro_batch]
        ids = plain["input_ids"]
        mask = plain.get("attention_mask", torch.ones_like(ids))
        parts = self._pack(batch_costs(ids, mask, self.rows_per_item, self.measure.sharing))
        if len(parts) == 1:
            return [micro_batch]
        selected = [micro_batch.select(part, count) for part in parts]
        return selected

    def _split_by_tokens(
        self, step: CollatedStep, share: Share, examples: list[dict[str, Any]], weights: np.ndarray
    ) -> CollatedStep:
        """The step with micro-batches of examples, each of which is collated by itself."""
        costs = self.measure.of(share.rows, examples)
        # A micro-batch has one weight for all its rows: rows of a last, smaller micro-batch of TRL are not mixed with
        # the others.
        same_weight = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        micro_batches: list[MicroBatch] = []
        for items in (rows[part].tolist() for rows in same_weight for part in self._pack(costs[rows])):
            batch, numbers = self.collator([examples[i] for i in items]), [share.rows[i] for i in items]
            self._refuse_use_of_padding(batch, numbers)
            self.measure.check(numbers, batch)
            is_complete = self._count(batch) == len(items)  # a collator of a user may drop items or add some
            micro_batches.append(MicroBatch(batch, float(weights[items].sum()), items if is_complete else ()))
        step = step._replace(micro_batches=micro_batches)
        if not all(m.items for m in micro_batches):
            return step
        trl_count = -(-share.rows_of_step // self.plan.per_round)
        return step._replace(trl_index=share.trl_index, trl_count=trl_count)

    def _count(self, batch: Any) -> int:
        """Items of a batch."""
        return len(batch["input_ids"]) // self.rows_per_item

    def _pack(self, costs: RowCosts) -> list[list[int]]:
        """The rows of each micro-batch."""
        pack = pack_depth_first if self.share_across_micro_batches else pack_by_budget
        short = self.budget / self.cp_size if self.cp_size > 1 else math.inf
        parts = split_by_length(costs, short)
        return [rows[packed].tolist() for rows in parts for packed in pack(costs[rows], self.budget)]

    def _refuse_use_of_padding(self, batch: dict[str, Any], numbers: list[int]) -> None:
        """
        Raise a [`PaddingRemovalError`] if padding of a micro-batch has labels, or if a sequence classifier scores it.

        Rows are padded to other lengths here than in the batch of TRL, so the loss would change. `numbers`: the row of
        the dataset of each item.
        """
        if scores_padding(batch):
            raise PaddingRemovalError(
                f"Padding has labels in rows {sorted(set(numbers))} of the dataset, and `max_tokens_per_batch` pads "
                "rows to other lengths than TRL: the loss would depend on it. Let your collator set labels to -100 "
                "where the attention mask is 0, or leave the budget out."
            )
