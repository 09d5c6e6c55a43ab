"""
Training batches by token budget.

A batch of the data loader is one optimizer step. The sampler deals its rows out to the processes with even work, the
collator splits those of a process into micro-batches, and `training_step` runs them one after another: counts of steps
and epochs, shuffling and resuming stay Trainer's. A step has the rows that it has without a budget, and each row
weighs in the loss what it weighs in TRL's mean over micro-batches, however the rows were split.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from .base import field_set
from .checks import length_dependent_rope, splitting_parallelism
from .config import check_token_budget
from .metrics import without_gathering
from .row_costs import RowCosts, StepPlan, split
from .row_measures import PairMeasure, TextMeasure


__all__ = ["BudgetCollator", "BudgetMixin", "BudgetSampler"]

logger = get_logger(__name__)

MICRO_BATCHES, ROWS = "micro_batches", "rows"
"""Keys of a batch that is a list of micro-batches, and of the places that their rows had in the batch."""


Piece = tuple[dict[str, Any], list[int]]
"""A micro-batch, and the places of its rows in the batch of the data loader."""


@dataclass
class BudgetCollator:
    """
    Splits the rows of a batch into micro-batches and collates each.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        measure ([`PairMeasure`] or [`TextMeasure`]):
            What examples cost.
        budget (`int`):
            Most tokens of a micro-batch.
        plan ([`StepPlan`]):
            The micro-batches of TRL, by which rows weigh.
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: PairMeasure | TextMeasure
    budget: int
    plan: StepPlan

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        costs, weights = self.measure.examples(examples), self.plan.weights(len(examples))
        # Rows of one micro-batch have one weight: those of a last micro-batch with fewer rows are split by themselves.
        alike = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        parts = [rows[part].tolist() for rows in alike for part in split(costs[rows], self.budget)]
        return {MICRO_BATCHES: [self.collator([examples[i] for i in rows]) for rows in parts], ROWS: parts}


class BudgetSampler(Sampler[int]):
    """
    The order of another sampler, rearranged so that the processes of each global batch have even work.

    Args:
        order (`Sampler[int]`):
            Order of the rows; the same on all processes.
        costs ([`RowCosts`]):
            Tokens of all rows.
        plan ([`StepPlan`]):
            The optimizer steps of an epoch.
        epoch (`Callable`):
            The epoch that an iteration is for. It is asked, since a dataloader that skips batches at several processes
            does not hand `set_epoch` on to its sampler (accelerate 1.15), and a resumed run would see another order.
    """

    def __init__(self, order: Sampler[int], costs: RowCosts, plan: StepPlan, epoch: Callable[[], int]):
        self.order, self.costs, self.plan, self.epoch = order, costs, plan, epoch

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.order, SeedableRandomSampler):
            self.order.set_epoch(self.epoch())
        return self.plan.arrange(list(self.order), self.costs)


class BudgetMixin:
    """Micro-batches of `max_tokens_per_batch` for a TRL trainer; stands in front of `PaddingRemovalMixin`."""

    _weight: float | None = None
    """Weight of the running micro-batch in the loss of its step, where its loss is a mean over its rows."""

    _plan: StepPlan | None = None
    """The steps of the epochs that are running."""

    def _check_before(self, config: Any, given: dict[str, Any]) -> None:
        super()._check_before(config, given)
        check_token_budget(config)
        if getattr(config, "max_tokens_per_batch", None) is None:
            return
        if config.gradient_accumulation_steps > 1:
            raise ValueError(
                f"`max_tokens_per_batch` was set after the configuration was made, with "
                f"`gradient_accumulation_steps={config.gradient_accumulation_steps}`. The budget says in how many "
                "pieces a batch is computed: pass it to the configuration, which counts the batch of a step anew."
            )
        if config.accelerator_config.split_batches or not config.accelerator_config.even_batches:
            raise ValueError(
                "`max_tokens_per_batch` deals equally many rows to every process: leave `split_batches` and "
                "`even_batches` out of `accelerator_config`."
            )
        if config.neftune_noise_alpha is not None:
            raise ValueError(
                f"`neftune_noise_alpha={config.neftune_noise_alpha}` adds noise whose size depends on the length of a "
                "padded batch, and `max_tokens_per_batch` makes other batches. Leave one of them out."
            )
        if not isinstance(given.get("train_dataset"), Dataset | None):
            raise ValueError(
                f"`max_tokens_per_batch` plans an epoch by the lengths of all its rows, and the training dataset is a "
                f"`{type(given['train_dataset']).__name__}`. Give a `datasets.Dataset` (of a stream "
                "`Dataset.from_generator`), or leave the budget out."
            )

    def _set_up_padding(self) -> None:
        super()._set_up_padding()
        if getattr(self.args, "max_tokens_per_batch", None) is None:
            return
        if reason := self._reason_not_to_split():
            raise ValueError(
                f"{reason}, so the loss of a batch is not the mean of the losses of its pieces, and "
                "`max_tokens_per_batch` cannot split it. Leave one of them out."
            )

    def _reason_not_to_split(self) -> str | None:
        """Why the loss of a batch depends on which rows are in one forward, if it does."""
        if getattr(self, "_is_vision_dataset", False):
            return "The dataset has images, which are not split with their rows"
        if getattr(self, "aux_loss_enabled", False):
            return "The load-balancing loss of the experts (`router_aux_loss_coef`) is taken over a whole forward"
        if splitting_parallelism(self.accelerator, "tp_size"):
            return "Under tensor parallelism several processes compute one batch"
        if kind := length_dependent_rope(self.model, self.args.max_length):
            return f"The model's {kind!r} rotary embedding depends on the longest row of a forward"
        return None

    def _measure(self) -> PairMeasure | TextMeasure:
        """Token costs of the rows of this trainer's data."""
        raise NotImplementedError

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(train_dataset)
        if getattr(self.args, "max_tokens_per_batch", None) is None:
            return sampler
        if not isinstance(sampler, RandomSampler | SequentialSampler):
            raise ValueError(
                f"`max_tokens_per_batch` rearranges rows by their lengths, and the configuration asks for a "
                f"`{type(sampler).__name__}`, which does the same in another way. Leave `train_sampling_strategy` "
                "(or `group_by_length`) out."
            )
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if isinstance(sampler, RandomSampler):
            # What accelerate makes of it: all processes draw alike, each epoch from its own seed. Without `data_seed`
            # that is torch's, which is `seed` unless the script has set another since the trainer was made.
            sampler = SeedableRandomSampler(dataset, data_seed=self.args.data_seed)
        costs = self._measure().dataset(dataset)
        over = costs.each > self.args.max_tokens_per_batch
        if over.any():
            logger.warning(
                f"{over.sum()} of {len(costs)} rows of the train dataset have more tokens than "
                f"`max_tokens_per_batch={self.args.max_tokens_per_batch}`, the longest {costs.each.max()}: each is a "
                "micro-batch of its own, and needs the memory of its size. Raise the budget, or lower `max_length`."
            )
        return BudgetSampler(sampler, costs, self._plan or self._step_plan(), epoch=lambda: int(self.state.epoch or 0))

    def _step_plan(self) -> StepPlan:
        micro_batch = self.args._rows_per_micro_batch
        return StepPlan(
            len(self.train_dataset),
            micro_batch,
            self._train_batch_size // micro_batch,
            self.accelerator.num_processes,
            self.args.dataloader_drop_last,
        )

    def get_train_dataloader(self) -> Any:
        budget = getattr(self.args, "max_tokens_per_batch", None)
        if budget is None:
            return super().get_train_dataloader()
        self._plan = self._step_plan()
        collator = BudgetCollator(self.data_collator, self._measure(), budget, self._plan)
        # The plan has left out what is to be dropped, which is less than a batch of the data loader.
        with field_set(self, "data_collator", collator), field_set(self.args, "dataloader_drop_last", False):
            return super().get_train_dataloader()

    def _counted_rows(self, batch: dict[str, Any]) -> list[Piece]:
        """Micro-batches and the places of their rows, without the rows that only fill up a last batch."""
        pieces = list(zip(batch[MICRO_BATCHES], batch[ROWS], strict=True))
        last = self._plan.last
        if self._plan.processes == 1 or not last or not self.accelerator.gradient_state.end_of_dataloader:
            return pieces
        kept = [(m, rows, [i for i, row in enumerate(rows) if row < last]) for m, rows in pieces]
        return [(_selected(m, keep, len(rows)), [rows[i] for i in keep]) for m, rows, keep in kept if keep]

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        return super()._get_num_items_in_batch(self._counted_batches(batch_samples), device)

    def _counted_batches(self, batch_samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of batches of the data loader."""
        counted = [[m for m, _ in self._counted_rows(b)] if MICRO_BATCHES in b else [b] for b in batch_samples]
        return [m for micro_batches in counted for m in micro_batches]

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        return sum(super(BudgetMixin, self).floating_point_ops(m) for m in _pieces(inputs))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for micro_batch in _pieces(inputs):
            super()._track_num_input_tokens(micro_batch)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if MICRO_BATCHES not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        pieces = self._counted_rows(inputs)
        most = len(pieces)
        if self.accelerator.num_processes > 1:
            most = int(self.accelerator.gather(torch.tensor([most], device=self.args.device)).max())
        pieces = _halved(pieces, most)
        weights = self._plan.weights(sum(len(rows) for _, rows in pieces))
        weights = [float(weights[rows].sum()) for _, rows in pieces]
        loss = torch.zeros((), device=self.args.device)
        with self._metrics_of_step([batch for batch, _ in pieces], weights, num_items_in_batch is not None):
            for i, (batch, _) in enumerate(pieces):
                if num_items_in_batch is None:
                    self._weight = weights[i]
                with self._gradients_synchronised(model, i == len(pieces) - 1):
                    loss = loss + super().training_step(model, batch, num_items_in_batch)
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss if self._weight is None else loss * self._weight

    @contextlib.contextmanager
    def _gradients_synchronised(self, model: Any, last: bool) -> Iterator[None]:
        """Whether the backward in this block ends the step, for those that reduce gradients over processes."""
        state = self.accelerator.gradient_state
        saved = state.sync_gradients
        state._set_sync_gradients(saved and last)
        try:
            each = state.plugin_kwargs.get("sync_each_batch", False)
            if last or each or self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                yield
            else:
                with self.accelerator.no_sync(model):
                    yield
        finally:
            state._set_sync_gradients(saved)

    @contextlib.contextmanager
    def _metrics_of_step(
        self, batches: Sequence[dict[str, Any]], weights: list[float], counts_tokens: bool
    ) -> Iterator[None]:
        """
        Let TRL log the means over all micro-batches of a step and all processes.

        It gathers its metrics forward by forward, equally many rows from every process; here each process keeps its
        own, and one reduction at the end of the step adds them up: means over rows by the weights of the rows, means
        over tokens by the numbers of tokens.
        """
        metrics, tokens = self._metrics["train"], self._total_train_tokens
        try:
            self._metrics["train"] = collected = defaultdict(list)
            with without_gathering(self.accelerator):
                yield
        finally:
            self._metrics["train"], self._weight = metrics, None
        sizes: dict[str, list[Any]] = defaultdict(list)
        for batch, weight in zip(batches, weights, strict=True):
            rest = self._loss_items(batch) if counts_tokens else weight
            for name, size in {"": rest, **self._metric_items(batch)}.items():
                sizes[name].append(size)
        collected.pop("num_tokens", None)
        names = sorted(name for name, values in collected.items() if len(values) == len(batches))
        device = self.args.device
        items = [[float(size) for size in sizes[n if n in sizes else ""]] for n in names]
        weighted_by = torch.tensor(items, dtype=torch.float64, device=device)
        values = torch.tensor([collected[n] for n in names], dtype=torch.float64, device=device)
        seen = values.new_tensor([self._total_train_tokens - tokens])
        totals = torch.cat([(values * weighted_by).sum(1), weighted_by.sum(1), seen])
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals)
        *totals, seen = totals.tolist()
        for name, total, weight in zip(names, totals, totals[len(names) :], strict=False):
            metrics[name].append(total / weight if weight else 0.0)
        self._total_train_tokens = tokens + int(seen)
        metrics["num_tokens"] = [self._total_train_tokens]


def _pieces(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return batch.get(MICRO_BATCHES, [batch])


def _selected(batch: dict[str, Any], items: list[int], count: int) -> dict[str, Any]:
    """Some of the `count` items of a batch, whose columns have a row for each item or several times as many."""
    return {name: torch.cat([rows[items] for rows in value.split(count)]) for name, value in batch.items()}


def _halved(pieces: list[Piece], count: int) -> list[Piece]:
    """`count` micro-batches, as many as the process with the most of them has: the largest are cut in two."""
    pieces = list(pieces)
    while len(pieces) < count:
        at = max(range(len(pieces)), key=lambda i: len(pieces[i][1]))
        batch, rows = pieces[at]
        items, middle = list(range(len(rows))), len(rows) // 2
        pieces[at : at + 1] = [
            (_selected(batch, part, len(rows)), [rows[i] for i in part]) for part in (items[:middle], items[middle:])
        ]
    return pieces
