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
from functools import cached_property
from typing import Any

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils import DistributedType
from accelerate.utils import gather as accelerate_gather
from datasets import Dataset

from ...core.model.patching import Attachment
from ..checks import column_names, rope_kind_beyond
from ..data.batch_layouts import LayoutCollator
from ..field_types import temporarily_set
from ..launches import models_of, replicas, splitting_parallelism
from ..packing import datasets_of
from ..parts import Part, Step
from ..watch.exact_means import without_gathering
from .config import check_token_budget
from .image_measures import ImageMeasure, check_images_of_processes, measure_images
from .micro_batches import MICRO_BATCHES, ONCE, WEIGHTS, BudgetCollator, Piece, halved
from .once import REPLAN, MicroBatches, computes_once
from .sampler import StepOrder, StepRows
from .split_forward import Splits, attach_splitting, joins_balancing_losses, splitting


__all__ = ["Budget", "Splitting"]

logger = get_logger(__name__)


class Splitting(Part):
    """Forwards that are split by `max_tokens_per_batch`."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._attached: list[Attachment] = []

    @property
    def budget(self) -> int | None:
        """
        Most tokens of a forward.

        Where `auto_find_batch_size` has lowered the batch size after a forward that did not fit into memory, it is
        lowered as much: what a forward needs goes by its tokens, and a step keeps its rows.
        """
        budget, args = self.settings.max_tokens_per_batch, self.trainer.args
        return budget and max(budget * self.trainer._train_batch_size // args.train_batch_size, 1)

    def check(self, config: Any, given: dict[str, Any]) -> None:
        check_token_budget(config)

    def attach(self) -> None:
        if self.settings.max_tokens_per_batch is None:
            return
        if reason := self.reason_not_to_split():
            raise ValueError(
                f"{reason}, so the loss of a batch is not the mean of the losses of its pieces, and "
                "`max_tokens_per_batch` cannot split it. Leave one of them out."
            )
        modules = map(self.trainer.padding.task.scoring_module, models_of(self.trainer))
        self._attached = [attach_splitting(module) for module in modules]

    def restore(self) -> None:
        for attachment in self._attached:
            attachment.remove()

    def reason_not_to_split(self) -> str | None:
        """Why the loss of a batch depends on which rows are in one forward, if it does."""
        trainer, task = self.trainer, self.trainer.padding.task
        if reason := task.reason_not_to_split():
            return reason
        if self.has_images() and task.compares_rows():
            return (
                "The loss compares rows, whose forwards are cut by rows, and which of the images in a batch belong to "
                "which row is not known there"
            )
        if getattr(trainer, "aux_loss_enabled", False) and not joins_balancing_losses():
            return (
                f"TRL {trl.__version__} takes the load-balancing loss of experts (`router_aux_loss_coef`) with the "
                "model's own loss, over a whole forward"
            )
        if splitting_parallelism(trainer.accelerator, "tp_size"):
            return "Under tensor parallelism several processes compute one batch"
        if kind := rope_kind_beyond(trainer.model, getattr(trainer.args, "max_length", None)):
            return f"The model's {kind!r} rotary embedding depends on the longest row of a forward"
        return None

    def has_images(self) -> bool:
        return any(column_names(dataset) & {"image", "images"} for dataset in datasets_of(self.trainer).values())

    def splitting(self) -> contextlib.AbstractContextManager[None]:
        """A block whose forwards are split by the budget, if there is one; those of rows with images are not."""
        if self.budget is None or self.has_images():
            return contextlib.nullcontext()
        handle = self.trainer.padding.handle
        sharing = bool(handle and handle.prefix_sharing)
        agree = self.most_over_processes if self._is_sharded else None
        return splitting(Splits(self.budget, sharing, agree, self.once))

    @cached_property
    def once(self) -> bool:
        """Whether prefixes are computed once in a step, and not by each piece; said once where they cannot be."""
        return self.budget is not None and computes_once(
            self.trainer.padding.handles, self.trainer.args, self._is_sharded
        )

    @property
    def _is_sharded(self) -> bool:
        """Whether processes meet in every forward, and not only at the end of the step."""
        return self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled

    def most_over_processes(self, count: int) -> int:
        if self.trainer.accelerator.num_processes == 1:
            return count
        counts = torch.tensor([count], device=self.trainer.args.device)
        return int(accelerate_gather(counts).max())

    def precomputing(self) -> contextlib.AbstractContextManager[None]:
        return self.splitting()


class Budget(Splitting):
    """Micro-batches of `max_tokens_per_batch`, in the steps of a [`StepOrder`]."""

    weight: float | None = None
    """Weight of the running micro-batch in the loss of its step, where its loss is a mean over its rows."""

    def check(self, config: Any, given: dict[str, Any]) -> None:
        super().check(config, given)
        if self.settings.max_tokens_per_batch is None:
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

    def reason_not_to_split(self) -> str | None:
        if self.trainer.padding.task.compares_rows() and self.trainer.is_deepspeed_enabled:
            return "The loss compares rows, and DeepSpeed does not compute forwards a second time within a backward"
        return super().reason_not_to_split()

    @contextlib.contextmanager
    def loading(self, dataset: Any, is_training: bool) -> Iterator[None]:
        if not is_training or self.budget is None:
            yield
            return
        trainer, task, order = self.trainer, self.trainer.padding.task, self.trainer.padding.part(StepOrder)
        order.steps = order.plan()
        rows = trainer._remove_unused_columns(dataset, description="training")
        order.images = self._measured_images(rows) if self.has_images() else None
        how = {"whole": task.compares_rows(), "by_tokens": task.averages_tokens(), "once": self.once}
        collator = BudgetCollator(trainer.data_collator, order.measure(), self.budget, order.steps, **how)
        # An item is a step of a process; the plan has left out the rows that are to be dropped.
        fields = {"train_dataset": StepRows(rows, order.steps), "data_collator": collator, "_train_batch_size": 1}
        with contextlib.ExitStack() as stack:
            for name, value in fields.items():
                stack.enter_context(temporarily_set(trainer, name, value))
            stack.enter_context(temporarily_set(trainer.args, "dataloader_drop_last", False))
            yield

    def _measured_images(self, rows: Dataset) -> ImageMeasure:
        trainer, collator = self.trainer, self.trainer.data_collator
        measure = measure_images(
            rows,
            collator.collator if isinstance(collator, LayoutCollator) else collator,
            sharing=bool(self.settings.prefix_sharing),
            processes=(trainer.accelerator.process_index, trainer.accelerator.num_processes),
            workers=getattr(trainer.args, "dataset_num_proc", None),
        )
        if trainer.accelerator.num_processes > 1:
            check_images_of_processes(measure)
        return measure

    def training_step(self, train: Callable, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's `training_step`, `train`, on each micro-batch of a step, as [`BudgetCollator`] makes them."""
        pieces: list[Piece] = list(zip(inputs[MICRO_BATCHES], inputs[WEIGHTS], strict=True))
        task = self.trainer.padding.task
        if task.compares_rows():
            return train(model, pieces[0][0], *args, **kwargs)
        counts_tokens = any(value is not None for value in (*args, *kwargs.values()))
        pieces = halved(pieces, self.most_over_processes(len(pieces)), task.rows_per_item)
        loss = torch.zeros((), device=self.trainer.args.device)
        once = self._once(pieces, inputs)
        with self._metrics_of_step(pieces, counts_tokens), splitting(once):
            for i, (batch, weight) in enumerate(pieces):
                if once is not None:
                    once.begin(i)
                # A piece without a weight only keeps step with the other processes.
                self.weight = None if counts_tokens and weight else weight
                with self._gradients_synchronised(model, i == len(pieces) - 1):
                    loss = loss + train(model, batch, *args, **kwargs)
        if once is not None:
            once.check()
        return loss

    def _once(self, pieces: list[Piece], inputs: dict[str, Any]) -> MicroBatches | None:
        """The micro-batches of a step that see each other's prefixes, if they have any in common."""
        if not self.once or len(pieces) == 1:
            return None
        planned = inputs.get(ONCE) if len(pieces) == len(inputs[MICRO_BATCHES]) else REPLAN
        found = MicroBatches.of([batch for batch, _ in pieces], planned, self.budget)
        if found is not None and self.trainer.state.global_step == 0:
            logger.info(found.pieces.summary)
        return found

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        split = step.mode == "eval" or self.trainer.padding.task.compares_rows()
        with self.splitting() if split else contextlib.nullcontext():
            yield
        if self.weight is not None:
            step.result = step.result * self.weight

    @contextlib.contextmanager
    def _gradients_synchronised(self, model: Any, last: bool) -> Iterator[None]:
        """Whether the backward in this block ends the step, for those that reduce gradients over processes."""
        accelerator = self.trainer.accelerator
        state = accelerator.gradient_state
        saved = state.sync_gradients
        state._set_sync_gradients(saved and last)
        try:
            each = state.plugin_kwargs.get("sync_each_batch", False)
            if last or each or accelerator.distributed_type == DistributedType.DEEPSPEED:
                yield
            else:
                with accelerator.no_sync(model):
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
        trainer, task = self.trainer, self.trainer.padding.task
        accelerator = trainer.accelerator
        metrics, tokens = trainer._metrics["train"], trainer._total_train_tokens
        try:
            trainer._metrics["train"] = collected = defaultdict(list)
            # Tokens of processes with the same rows are divided by their number behind the reduction.
            with without_gathering(accelerator), temporarily_set(trainer, "_tp_size", 1):
                yield
        finally:
            trainer._metrics["train"], self.weight = metrics, None
        sizes: dict[str, list[Any]] = defaultdict(list)
        for batch, weight in pieces:
            rest = task.loss_items(batch) if counts_tokens else weight
            for name, size in {"": rest, **task.metric_items(batch)}.items():
                sizes[name].append(size if weight else 0)
        collected.pop("num_tokens", None)
        names = sorted(name for name, values in collected.items() if len(values) == len(pieces))
        device = trainer.args.device
        items = [[float(size) for size in sizes[n if n in sizes else ""]] for n in names]
        shape = len(names), len(pieces)  # also where a loss of the user's own logs nothing
        weighted_by = torch.tensor(items, dtype=torch.float64, device=device).view(shape)
        values = torch.tensor([collected[n] for n in names], dtype=torch.float64, device=device).view(shape)
        extremes = {n: take(values[names.index(n)]) for n, take in task.extremes.items() if n in names}
        again = sum(int(batch["attention_mask"].sum()) for batch, weight in pieces if not weight)
        seen = values.new_tensor([trainer._total_train_tokens - tokens - again])
        totals = torch.cat([(values * weighted_by).sum(1), weighted_by.sum(1), seen])
        if accelerator.num_processes > 1:
            totals = accelerator.reduce(totals)
        *totals, seen = totals.tolist()
        for name, total, weight in zip(names, totals, totals[len(names) :], strict=False):
            metrics[name].append(total / weight if weight else 0.0)
        for name, extreme in extremes.items():
            metrics[name][-1] = float(task.extremes[name](accelerator.gather(extreme)))
        trainer._total_train_tokens = tokens + int(seen) // replicas(trainer)
        metrics["num_tokens"] = [trainer._total_train_tokens]
