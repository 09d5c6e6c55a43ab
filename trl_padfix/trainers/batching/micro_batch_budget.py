"""
Training batches by token budget.

A batch of the data loader is one optimizer step. The sampler partitions its rows over the processes by tokens, the
collator splits the rows of a process into micro-batches, and `training_step` runs these one after another. A step has
the same rows as without a budget, and each row has the weight that it has in TRL's mean over micro-batches.

A loss that compares rows is computed once for each micro-batch of TRL, with its forwards in sub-batches
(`token_budget.py`). The collator counts the images of each row, so that forwards with images can be split, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from ..custom_loss import computes_loss_itself, custom_loss_name, is_custom_collator, may_read_steps
from ..data.image_rows import has_pixels, without_images
from ..data.tokenizers import tokenizer_of
from ..distributed import gather_counts, is_sharded, max_over_processes, sync_gradients_in_last
from ..temporary_attributes import temporarily_set
from .budget_checks import check_configuration, custom_collator_notice, has_images
from .budget_collator import BudgetCollator
from .claims import claimed_weights, differs, loss_and_norm, without_dropout
from .micro_batches import CollatedStep, MicroBatch, join_batches, step_of, to_equal_count
from .prefix_schedule import STALE_PLAN, MicroBatchRunner
from .sampler import StepDataset, StepOrder
from .step_metrics import StepMetrics
from .step_plan import StepPlan
from .token_budget import SubBatchBudget
from .user_steps import step_of_user, train_by_trl_micro_batch


if TYPE_CHECKING:
    from transformers import TrainingArguments


__all__ = ["MicroBatchBudget"]

logger = get_logger(__name__)


class MicroBatchBudget(SubBatchBudget):
    """`max_tokens_per_batch` for the micro-batches of a step, in the order of a [`StepOrder`]."""

    _claim_is_verified = False

    trl_sizes: Sequence[int] = ()
    """Items of each of TRL's micro-batches in the last step of the data loader."""

    _epoch: float | None = None
    """The epoch that the last step has set."""

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        super().check(config, init_kwargs)
        if self.settings.max_tokens_per_batch is not None:
            check_configuration(config, init_kwargs.get("train_dataset"))

    @contextlib.contextmanager
    def around_dataloader(self, dataset: Dataset | IterableDataset, is_training: bool) -> Iterator[None]:
        if not is_training or self.budget is None:
            yield
            return
        self._check_loss()  # a loss may have been set on the trainer after its `__init__`
        trainer, order = self.trainer, self.trainer.padding.part(StepOrder)
        is_stream = not isinstance(dataset, Dataset)
        rows = dataset if is_stream else trainer._remove_unused_columns(dataset, description="training")
        steps = order.fix_steps(rows if has_images(trainer) else None)
        if order.has_custom_collator or (order.images is not None and is_custom_collator(order.collator)):
            logger.warning(custom_collator_notice(order.images is not None, trainer.padding.task.needs_all_rows()))
        # An item is a step of a process; the plan has left out the rows that are dropped.
        items = order.stream(rows, self.budget) if is_stream else StepDataset(rows, steps)
        # For a stream accelerate dispatches batches by default. It would cut tensors by rows, and a step has none.
        dispatching_config = trainer.accelerator.dataloader_config if is_stream else None
        with (
            temporarily_set(trainer, "data_collator", self._collator(order, steps)),
            temporarily_set(trainer, "train_dataset", items),
            temporarily_set(trainer, "_train_batch_size", 1),
            temporarily_set(trainer.args, "dataloader_drop_last", False),
            temporarily_set(dispatching_config, "dispatch_batches", False),
        ):
            yield

    def _collator(self, order: StepOrder, steps: StepPlan) -> BudgetCollator:
        """The collator that splits a step of a process into micro-batches."""
        trainer, task, handle = self.trainer, self.trainer.padding.task, self.trainer.padding.handle
        assert self.budget is not None
        return BudgetCollator(
            trainer.data_collator,
            order.measure(),
            self.budget,
            steps,
            keeps_micro_batches=task.needs_all_rows(),
            weight_by_tokens=task.loss_is_token_mean(),
            share_across_micro_batches=self.share_across_micro_batches,
            # Processes that shard a model plan together in each step, which a worker cannot.
            plan_in_worker=self.share_across_micro_batches and not is_sharded(trainer),
            cuts_batches=order.has_custom_collator,
            rows_per_item=task.rows_per_item,
            pad_token_id=getattr(tokenizer_of(trainer.processing_class), "pad_token_id", None) or 0,
            adds_whole=may_read_steps(trainer),
            cp_size=handle.context_parallel.size if handle and handle.context_parallel else 1,
        )

    def training_step(
        self, train: Callable, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's `training_step`, `train`, on each micro-batch of a step, as [`BudgetCollator`] makes them."""
        if self.budget is None:
            return train(model, inputs, *args, **kwargs)
        if computes_loss_itself(train):  # the method of a class after ours in the MRO, or patched onto TRL's class
            return self.train_by_trl_micro_batch(train, model, inputs, *args, **kwargs)
        if (step := step_of(inputs)) is None:
            step = step_of_user(self.trainer, inputs, self.trl_sizes)
        needs_all_rows = self.trainer.padding.task.needs_all_rows()
        if needs_all_rows and len(step.micro_batches) > 1 and not step.keeps_micro_batches:
            name = custom_loss_name(self.trainer) or self.trainer.padding.gradient_hook
            raise ValueError(
                f"`{name}` was set during training, and the rows of this step were split already: its value for "
                "all rows of a micro-batch is not known from their parts. Set it before `train()`."
            )
        # Trainer passes `num_items_in_batch`: the loss then divides by the tokens of the step itself. A
        # `get_batch_samples` of a user may count for losses without labels, which take no such number.
        num_items = next(iter((*args, *kwargs.values())), None)
        counts_tokens = num_items is not None and "labels" in step.micro_batches[0].batch

        def run(batch: dict[str, Any]) -> Any:
            return train(model, batch, *args, **kwargs)

        if step.keeps_micro_batches or needs_all_rows:
            return self._train_kept(run, model, step, counts_tokens)
        return self._train_split(run, model, step, counts_tokens, num_items)

    def _train_kept(
        self, run: Callable[[dict[str, Any]], Any], model: torch.nn.Module, step: CollatedStep, counts_tokens: bool
    ) -> Any:
        """The micro-batches of TRL one after another; their forwards are split, and TRL averages their metrics."""
        loss = torch.zeros((), device=self.trainer.args.device)
        for i, (batch, weight, _) in enumerate(step.micro_batches):
            is_last = i == len(step.micro_batches) - 1
            with (
                temporarily_set(self, "weight", None if counts_tokens else weight),
                sync_gradients_in_last(self.trainer, model, is_last),
            ):
                loss = loss + run(batch)
        return loss

    def _train_split(
        self,
        run: Callable[[dict[str, Any]], Any],
        model: torch.nn.Module,
        step: CollatedStep,
        counts_tokens: bool,
        num_items: torch.Tensor | int | None,
    ) -> Any:
        """The micro-batches of the budget one after another, each with the weight of its rows in TRL's loss."""
        trainer = self.trainer
        micro_batches = self._match_other_processes(step.micro_batches)
        # A micro-batch with weight 0 only matches the forwards of other processes.
        weights: list[Any] = [None if counts_tokens and m.weight else m.weight for m in micro_batches]
        if custom_loss_name(trainer) and (reduction := self.settings.loss_reduction):
            counts_tokens = False  # the claim alone determines the weights
            weights = claimed_weights(reduction, micro_batches, trainer.padding.task.num_label_tokens)
            if not self._claim_is_verified and len(micro_batches) > 1:
                self._verify_claim(reduction, model, [m.batch for m in micro_batches], weights, num_items)
                self._claim_is_verified = True
        loss = torch.zeros((), device=trainer.args.device)
        with self._run(self._runner(micro_batches, step)) as metrics, temporarily_set(self, "weight", None):
            for i, micro_batch in enumerate(micro_batches):
                self.weight = weights[i]
                num_items_of = self._num_metric_items(micro_batch, counts_tokens)
                is_counted = step.trl_index and micro_batch.weight
                trl_index = [step.trl_index[item] for item in micro_batch.items] if is_counted else None
                with self._micro_batch(i, model), metrics.micro_batch(num_items_of, trl_index=trl_index):
                    loss = loss + run(micro_batch.batch)
        repeated = [m.batch for m in micro_batches if not m.weight]
        masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in repeated]
        metrics.log(sum(int(mask.sum()) for mask in masks), step.trl_count)
        return loss

    def _match_other_processes(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """
        As many micro-batches as the process with most of them has: the largest are cut, or one is repeated with weight
        0.

        Micro-batches with images come last: DDP reduces the gradients of those parameters that the last backward used,
        and the vision tower must be among them.

        Raises:
            ValueError: If processes that shard a model would wait for one without images in its vision tower.
        """
        trainer, rows_per_item = self.trainer, self.trainer.padding.task.rows_per_item
        if trainer.padding.part(StepOrder).images is None or not is_sharded(trainer):
            count = max_over_processes(trainer, len(micro_batches))
            return sorted(to_equal_count(micro_batches, count, rows_per_item), key=lambda m: has_pixels(m.batch))
        texts = [m for m in micro_batches if not has_pixels(m.batch)]
        with_images = [m for m in micro_batches if has_pixels(m.batch)]
        text_count, image_counts = max_over_processes(trainer, len(texts)), gather_counts(trainer, len(with_images))
        if any(image_counts) and not all(image_counts):  # on every process, none of which then waits for the others
            raise ValueError(
                f"No row of process {image_counts.index(0)} has an image in step {trainer.state.global_step + 1}, and "
                "processes that shard a model (FSDP, ZeRO-3) meet in its vision tower. As with TRL alone, each batch "
                "of each process needs a row with an image."
            )
        if text_count and not texts:  # a batch without its images computes the same layers; its weight is 0
            texts = [MicroBatch(without_images(with_images[0].batch), 0.0)]
        texts = to_equal_count(texts, text_count, rows_per_item)
        return texts + to_equal_count(with_images, max(image_counts), rows_per_item)

    def note_step(self, batches: Sequence[Any]) -> None:
        step = step_of(batches[0]) if batches else None
        self.trl_sizes = () if step is None else step.trl_sizes

    def train_by_trl_micro_batch(
        self, train: Callable, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return train_by_trl_micro_batch(self.trainer, self.trl_sizes, train, model, inputs, *args, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        """Set `state.epoch` to its value in TRL after as many steps. `epoch`: the number of the running epoch."""
        state, order = self.trainer.state, self.trainer.padding.part(StepOrder)
        # Once per step, because transformers sets `state.epoch` in each by the number of batches of the data loader.
        if self.budget is None or not order.steps or not order.steps.rows or state.epoch == self._epoch:
            return
        steps = round((state.epoch - epoch) * len(order.steps) / order.steps.processes)
        state.epoch = self._epoch = epoch + order.steps.share_of_epoch(steps)

    def _verify_claim(
        self,
        reduction: str,
        model: torch.nn.Module,
        batches: Sequence[dict[str, Any]],
        weights: Sequence[Any],
        num_items: torch.Tensor | int | None,
    ) -> None:
        """
        Compare the loss of all rows with that of the micro-batches, and the norms of their gradients.

        This trains nothing and logs nothing. If processes shard gradients, only the losses are compared.

        Raises:
            ValueError: If they differ.
        """
        trainer = self.trainer
        shards = is_sharded(trainer) or trainer.is_deepspeed_enabled
        parameters = [] if shards else [p for p in trainer.model.parameters() if p.requires_grad]

        def loss(batch: dict[str, Any], weight: Any) -> Any:
            inputs = trainer._prepare_inputs(dict(batch))
            with trainer.compute_loss_context_manager(), temporarily_set(self, "weight", weight):
                return trainer.compute_loss(model, inputs, num_items_in_batch=num_items)

        with (
            without_dropout(trainer.model),
            torch.random.fork_rng(),
            trainer.accelerator.no_sync(model) if not shards else contextlib.nullcontext(),
            torch.set_grad_enabled(not shards),
            StepMetrics(trainer).discarded(),
        ):
            whole = join_batches(batches, trainer.padding.task.rows_per_item)
            expected = loss_and_norm([partial(loss, whole, None)], parameters)
            with self._run(MicroBatchRunner(len(batches))):
                split = zip(batches, weights, strict=True)
                claimed = loss_and_norm([partial(loss, plain, weight) for plain, weight in split], parameters)
        if differs(expected, claimed, next(trainer.model.parameters()).dtype):
            raise ValueError(
                f"`loss_reduction={reduction!r}` is not what `{custom_loss_name(trainer)}` computes: on the first "
                f"step its loss is {expected[0]:.6f} for all rows at once (gradient norm {expected[1]:.6f}), and "
                f"{claimed[0]:.6f} ({claimed[1]:.6f}) from {len(batches)} micro-batches with this reduction. Set the "
                "right one of 'rows', 'tokens' and 'sum', or leave it out: the loss then gets all rows of a step."
            )

    def _num_metric_items(self, micro_batch: MicroBatch, counts_tokens: bool) -> dict[str, Any]:
        """Number of items that each metric of a micro-batch is a mean over; `""` stands for all other metrics."""
        task, (batch, weight, _) = self.trainer.padding.task, micro_batch
        if not weight:
            return {"": 0}
        return {"": task.num_loss_items(batch) if counts_tokens else weight, **task.num_metric_items(batch)}

    def _runner(self, micro_batches: list[MicroBatch], step: CollatedStep) -> MicroBatchRunner:
        """The runner of the micro-batches of a step, with the plan of their shared prefixes if there are any."""
        if not self.share_across_micro_batches or len(micro_batches) == 1:
            return MicroBatchRunner(len(micro_batches))
        plan = step.prefix_plan if len(micro_batches) == len(step.micro_batches) else STALE_PLAN
        gather = gather_object if is_sharded(self.trainer) else None
        assert self.budget is not None
        return MicroBatchRunner.of([m.batch for m in micro_batches], plan, self.budget, gather)
