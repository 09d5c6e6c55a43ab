"""
Training batches by token budget.

A batch of the data loader is one optimizer step. The sampler deals its rows out to the processes with even work, the
collator splits those of a process into micro-batches, and `training_step` runs them one after another: counts of steps
and epochs, shuffling and resuming stay Trainer's. A step has the rows that it has without a budget, and each row
weighs in the loss what it weighs in TRL's mean over micro-batches, however the rows were split.

A loss that compares the rows of a forward, or balances experts over it, is computed from all rows of a process at
once, and its forwards are split (`split_forward.py`); so are the forwards of an evaluation, which need no second pass.
Images go with their rows as long as their collator makes the batches, so forwards with images are never split.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import trl
from accelerate.utils import DistributedType
from accelerate.utils import gather as accelerate_gather
from datasets import Dataset

from ...core.model.patching import Attachment
from ..checks import column_names, rope_kind_beyond, splitting_parallelism
from ..data.batch_layouts import images_in, scored, without_layouts
from ..field_types import temporarily_set
from ..watch.exact_means import without_gathering
from .config import check_token_budget
from .dealing import StepPlan, split
from .image_measures import ImageMeasure, check_images_of_processes, measure_images
from .measures import RowMeasure
from .sampler import StepMixin, StepRows
from .split_forward import Splits, attach_splitting, joins_balancing_losses, splitting


__all__ = ["BudgetCollator", "BudgetMixin", "SplittingMixin"]

MICRO_BATCHES, WEIGHTS = "micro_batches", "weights"
"""Keys of a batch that is a list of micro-batches, and of their weights in the loss of the step."""


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
    """

    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    measure: RowMeasure
    budget: int
    plan: StepPlan
    whole: bool = False
    by_tokens: bool = False

    def __call__(self, shares: list[tuple[int, list[int], list[dict[str, Any]]]]) -> dict[str, Any]:
        ((of_step, numbers, examples),) = shares
        if self.whole:
            return {MICRO_BATCHES: [self.collator(examples)], WEIGHTS: [1.0]}
        costs, weights = self.measure.of(numbers, examples), self.plan.weights(len(examples), of_step)
        # Rows of one micro-batch have one weight: those of a last micro-batch with fewer rows are split by themselves.
        alike = [np.flatnonzero(weights == weight) for weight in np.unique(weights)]
        parts = [rows[part].tolist() for rows in alike for part in split(costs[rows], self.budget)]
        batches = [self.collator([examples[i] for i in rows]) for rows in parts]
        for rows, batch in zip(parts, batches, strict=True):
            self.measure.check([numbers[i] for i in rows], batch)
        if self.by_tokens:
            counts = [0 if (found := scored(batch)) is None else len(found) for batch in batches]
            return {MICRO_BATCHES: batches, WEIGHTS: [count / max(sum(counts), 1) for count in counts]}
        return {MICRO_BATCHES: batches, WEIGHTS: [float(weights[rows].sum()) for rows in parts]}


class SplittingMixin:
    """Forwards that are split by `max_tokens_per_batch`; stands in front of `PaddingRemovalMixin`."""

    _attachments: list[Attachment]

    def _set_up_padding(self) -> None:
        attached = bool(self._handles)
        super()._set_up_padding()
        if getattr(self.args, "max_tokens_per_batch", None) is None:
            return
        if reason := self._reason_not_to_split():
            raise ValueError(
                f"{reason}, so the loss of a batch is not the mean of the losses of its pieces, and "
                "`max_tokens_per_batch` cannot split it. Leave one of them out."
            )
        if not attached:
            models = (m for m in (self.model, getattr(self, "ref_model", None)) if m is not None)
            self._attachments += map(attach_splitting, models)

    def _reason_not_to_split(self) -> str | None:
        """Why the loss of a batch depends on which rows are in one forward, if it does."""
        if self._has_images() and self._compares_rows():
            return (
                "The loss compares rows, whose forwards are cut by rows, and which of the images in a batch belong to "
                "which row is not known there"
            )
        if getattr(self, "aux_loss_enabled", False) and not joins_balancing_losses():
            return (
                f"TRL {trl.__version__} takes the load-balancing loss of experts (`router_aux_loss_coef`) with the "
                "model's own loss, over a whole forward"
            )
        if splitting_parallelism(self.accelerator, "tp_size"):
            return "Under tensor parallelism several processes compute one batch"
        if kind := rope_kind_beyond(self.model, getattr(self.args, "max_length", None)):
            return f"The model's {kind!r} rotary embedding depends on the longest row of a forward"
        return None

    def _compares_rows(self) -> bool:
        """Whether the loss of a forward is no mean over its rows, so that it takes two passes to split it."""
        return getattr(self, "aux_loss_enabled", False)

    def _has_images(self) -> bool:
        return any(column_names(dataset) & {"image", "images"} for dataset in self._datasets().values())

    def _splitting(self) -> contextlib.AbstractContextManager[None]:
        """A block whose forwards are split by the budget, if there is one; those of rows with images are not."""
        budget = getattr(self.args, "max_tokens_per_batch", None)
        if budget is None or self._has_images():
            return contextlib.nullcontext()
        sharing = bool(self._handles and self._handles[0].prefix_sharing)
        # Sharded models meet in every forward, the others at the end of the step.
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return splitting(Splits(budget, sharing, self._most_over_processes if sharded else None))

    def _most_over_processes(self, count: int) -> int:
        if self.accelerator.num_processes == 1:
            return count
        counts = torch.tensor([count], device=self.args.device)
        return int(accelerate_gather(counts).max())

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._set_up_padding()
        with self._splitting():
            return super()._precompute_ref_logps(*args, **kwargs)


class BudgetMixin(SplittingMixin, StepMixin):
    """Micro-batches of `max_tokens_per_batch` for a TRL trainer; stands in front of `PaddingRemovalMixin`."""

    _weight: float | None = None
    """Weight of the running micro-batch in the loss of its step, where its loss is a mean over its rows."""

    _rows_per_item = 1
    """Rows of a batch that belong together, as in [`ExactEvalMixin`]."""

    _images: ImageMeasure | None = None
    """Token counts of the rows of a train dataset with images."""

    _extremes: dict[str, Callable] = {}
    """Metrics of TRL that are no means but the least or the most over rows, and what takes it."""

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

    def _reason_not_to_split(self) -> str | None:
        if self._compares_rows() and self.is_deepspeed_enabled:
            return "The loss compares rows, and DeepSpeed does not compute forwards a second time within a backward"
        return super()._reason_not_to_split()

    def _averages_tokens(self) -> bool:
        """Whether the loss of a forward is a mean over its tokens, whatever else is in the step."""
        return False

    def get_train_dataloader(self) -> Any:
        budget = getattr(self.args, "max_tokens_per_batch", None)
        if budget is None:
            return super().get_train_dataloader()
        self._plan = self._step_plan()
        rows = self._remove_unused_columns(self.train_dataset, description="training")
        self._images = self._measured_images(rows) if self._has_images() else None
        collator = self._layout_collator(self.train_dataset, is_training=True)
        how = {"whole": self._compares_rows(), "by_tokens": self._averages_tokens()}
        collator = BudgetCollator(collator, self._measure(), budget, self._plan, **how)
        # An item is a step of a process; the plan has left out the rows that are to be dropped.
        fields = {"train_dataset": StepRows(rows, self._plan), "data_collator": collator, "_train_batch_size": 1}
        with contextlib.ExitStack() as stack:
            for name, value in fields.items():
                stack.enter_context(temporarily_set(self, name, value))
            stack.enter_context(temporarily_set(self.args, "dataloader_drop_last", False))
            return super().get_train_dataloader()

    def _measured_images(self, rows: Dataset) -> ImageMeasure:
        measure = measure_images(
            rows,
            self.data_collator,
            sharing=bool(getattr(self.args, "prefix_sharing", False)),
            processes=(self.accelerator.process_index, self.accelerator.num_processes),
            workers=getattr(self.args, "dataset_num_proc", None),
        )
        if self.accelerator.num_processes > 1:
            check_images_of_processes(measure)
        return measure

    def _measure(self) -> RowMeasure:
        return self._images or super()._measure()

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        return super()._get_num_items_in_batch(self._counted_batches(batch_samples), device)

    def _counted_batches(self, batch_samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of batches of the data loader."""
        return [m for batch in batch_samples for m in _pieces(batch)]

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        return sum(super(BudgetMixin, self).floating_point_ops(m) for m in _pieces(inputs))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for micro_batch in _pieces(inputs):
            super()._track_num_input_tokens(micro_batch)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if MICRO_BATCHES not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        pieces: list[Piece] = list(zip(inputs[MICRO_BATCHES], inputs[WEIGHTS], strict=True))
        if self._compares_rows():
            return super().training_step(model, pieces[0][0], num_items_in_batch)
        pieces = _halved(pieces, self._most_over_processes(len(pieces)), self._rows_per_item)
        loss = torch.zeros((), device=self.args.device)
        with self._metrics_of_step(pieces, num_items_in_batch is not None):
            for i, (batch, weight) in enumerate(pieces):
                # A piece without a weight only keeps step with the other processes.
                self._weight = weight if num_items_in_batch is None or weight == 0 else None
                with self._gradients_synchronised(model, i == len(pieces) - 1):
                    loss = loss + super().training_step(model, batch, num_items_in_batch)
        return loss

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        split = not self.model.training or self._compares_rows()
        with self._splitting() if split else contextlib.nullcontext():
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
    def _metrics_of_step(self, pieces: Sequence[Piece], counts_tokens: bool) -> Iterator[None]:
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
        for batch, weight in pieces:
            rest = self._loss_items(batch) if counts_tokens else weight
            for name, size in {"": rest, **self._metric_items(batch)}.items():
                sizes[name].append(size if weight else 0)
        collected.pop("num_tokens", None)
        names = sorted(name for name, values in collected.items() if len(values) == len(pieces))
        device = self.args.device
        items = [[float(size) for size in sizes[n if n in sizes else ""]] for n in names]
        weighted_by = torch.tensor(items, dtype=torch.float64, device=device)
        values = torch.tensor([collected[n] for n in names], dtype=torch.float64, device=device)
        extremes = {n: take(values[names.index(n)]) for n, take in self._extremes.items() if n in names}
        again = sum(int(batch["attention_mask"].sum()) for batch, weight in pieces if not weight)
        seen = values.new_tensor([self._total_train_tokens - tokens - again])
        totals = torch.cat([(values * weighted_by).sum(1), weighted_by.sum(1), seen])
        if self.accelerator.num_processes > 1:
            totals = self.accelerator.reduce(totals)
        *totals, seen = totals.tolist()
        for name, total, weight in zip(names, totals, totals[len(names) :], strict=False):
            metrics[name].append(total / weight if weight else 0.0)
        for name, extreme in extremes.items():
            metrics[name][-1] = float(self._extremes[name](self.accelerator.gather(extreme)))
        self._total_train_tokens = tokens + int(seen)
        metrics["num_tokens"] = [self._total_train_tokens]


def _pieces(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return batch.get(MICRO_BATCHES, [batch])


def _halved(pieces: list[Piece], count: int, rows_per_item: int) -> list[Piece]:
    """
    `count` micro-batches, as many as the process with the most of them has.

    The largest are cut in two. Where none has two rows, or all have images, which have no row for each row, the one
    with the fewest rows comes again without a weight.
    """
    pieces = list(pieces)
    while len(pieces) < count:
        items = [1 if images_in(batch) else len(batch["input_ids"]) // rows_per_item for batch, _ in pieces]
        at = max(range(len(pieces)), key=items.__getitem__)
        (batch, weight), n, middle = pieces[at], items[at], items[at] // 2
        if not middle:
            smallest, _ = min(pieces, key=lambda piece: len(piece[0]["input_ids"]))
            pieces.append((smallest, 0.0))
            continue
        batch, _ = without_layouts(batch)
        pieces[at : at + 1] = [
            (_selected(batch, part, n), weight * len(part) / n) for part in (range(middle), range(middle, n))
        ]
    return pieces


def _selected(batch: dict[str, Any], items: Sequence[int], count: int) -> dict[str, Any]:
    """Some of the `count` items of a batch, whose columns have a row for each item or several times as many."""
    return {name: torch.cat([rows[list(items)] for rows in value.split(count)]) for name, value in batch.items()}
