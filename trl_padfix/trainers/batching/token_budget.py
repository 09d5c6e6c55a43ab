"""
Training batches by token budget.

A batch of the data loader is one optimizer step. The sampler partitions its rows over the processes by tokens, the
collator splits the rows of a process into micro-batches, and `training_step` runs these one after another. A step has
the same rows as without a budget, and each row has the weight that it has in TRL's mean over micro-batches.

A loss that compares the rows of a forward, or balances experts over it, is computed from each micro-batch of TRL at
once: its forwards are run in sub-batches (`sub_batches.py`), as are those of an evaluation. If rows are compared
without gradients only (the KL term of KTO, the advantages of GRPO), the rest of the loss is computed in sub-batches.
The collator counts the images of each row, by which such a forward is split, too.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset

from ...core.call.runner_patch import attach_runner_patch
from ...core.context import within
from ...core.model.find import find_pretrained
from ...core.model.patching import Attachment
from ..backward_hooks import gradient_hook_name, module_hook_names
from ..checks import rope_kind_beyond
from ..custom_loss import computes_own_loss, custom_loss_name, is_custom_collator, may_read_steps, observe_own_loss
from ..data.batch_metadata import BatchWithMetadata, pop_metadata
from ..data.columns import column_names
from ..data.image_rows import ImageCounts, has_pixels, numbered_images, select_rows, without_images
from ..data.tokenizers import tokenizer_of
from ..distributed import (
    datasets_of,
    is_fsdp2,
    is_sharded,
    max_over_processes,
    models_of,
    splitting_parallelism,
    sync_gradients_in_last,
)
from ..parts import Part, Step
from ..settings import check_token_budget
from ..temporary_attributes import temporarily_set
from .claims import claimed_weights, differs, loss_and_norm, without_dropout
from .micro_batches import (
    BudgetCollator,
    CollatedStep,
    MicroBatch,
    StepBatch,
    items_of,
    join_batches,
    step_of,
    to_equal_count,
)
from .prefix_schedule import STALE_PLAN, MicroBatchRunner, can_share_across_micro_batches
from .sampler import StepDataset, StepOrder
from .step_metrics import StepMetrics
from .sub_batches import SubBatches, joins_balancing_losses


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..parts import PaddingFreeTrainer


__all__ = ["MicroBatchBudget", "SubBatchBudget"]

logger = get_logger(__name__)

_TURNS = "micro_batches_of_trl"


class SubBatchBudget(Part):
    """`max_tokens_per_batch` for the forwards of one batch, which are run in sub-batches."""

    running: MicroBatchRunner | None = None
    """The micro-batches of the running step, if it has any."""

    weight: float | None = None
    """Weight of the running micro-batch in the loss of its step, if its loss is a mean over its rows."""

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._attached: list[Attachment] = []
        self._checked_models: WeakSet[Any] = WeakSet()

    @property
    def budget(self) -> int | None:
        """
        Most tokens of a forward.

        If `auto_find_batch_size` has lowered the batch size after a forward did not fit into memory, the budget is
        lowered by the same factor, because memory depends on tokens. A step keeps its rows.
        """
        budget, args = self.settings.max_tokens_per_batch, self.trainer.args
        return budget and max(budget * self.trainer._train_batch_size // args.train_batch_size, 1)

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        check_token_budget(config)

    def attach(self) -> None:
        if self.settings.max_tokens_per_batch is None:
            return
        self._check_loss()

    def _check_loss(self) -> None:
        """Refuse a loss that cannot be split, and warn of one whose forwards are computed again in backward."""
        self.trainer.padding.gradient_hook = gradient_hook_name(self.trainer)
        if reason := _budget_obstacle(self.trainer):
            raise ValueError(
                f"{reason}, so the loss of a batch is not the mean of the losses of its micro-batches, and "
                "`max_tokens_per_batch` cannot split it. Leave one of them out."
            )
        recomputed = "All sub-batches of its forward but one are computed again in the backward pass."
        if name := custom_loss_name(self.trainer):
            logger.warning_once(
                f"`max_tokens_per_batch`: whether the loss of `{name}` compares rows is unknown, so it is computed "
                f"from each whole micro-batch of TRL. {recomputed}"
            )
        if hook := self.trainer.padding.gradient_hook:
            logger.warning_once(
                f"`max_tokens_per_batch`: `{hook}` acts in the backward pass, on the gradient of a micro-batch, "
                f"so each micro-batch of TRL has one backward. {recomputed}"
            )
        if names := module_hook_names(self.trainer.model):
            logger.warning_once(
                f"`max_tokens_per_batch` computes a step in several micro-batches, and the backward hooks of modules "
                f"({', '.join(names[:3])}) are called for each of them, with the gradients of its packed tokens."
            )

    def attach_to_models(self) -> None:
        if self.settings.max_tokens_per_batch is None:
            return
        self.restore()
        for handle in self.trainer.padding.handles:
            handle.token_budget = self.budget
        vars(self).pop("share_across_micro_batches", None)  # depends on the models
        modules = map(self.trainer.padding.task.scoring_module, models_of(self.trainer))
        self._attached = [attach_runner_patch(module) for module in modules]

    def restore(self) -> None:
        for attachment in self._attached:
            attachment.remove()

    def split_forwards(
        self, *concatenated: torch.Tensor, images: ImageCounts | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """
        A block whose forwards are run in sub-batches, if there is a budget.

        Within a micro-batch forwards are not split again. `concatenated`: ids and mask of its forward, where the loss
        concatenates them into new tensors. `images`: those of its rows, by default those of the running step.
        """
        if self.running is not None:
            if concatenated:
                self.running.set_inputs(*concatenated)
            return contextlib.nullcontext()
        if self.budget is None:
            return contextlib.nullcontext()
        return within(runner=self._sub_batches(self.budget, images))

    def _sub_batches(self, budget: int, images: ImageCounts | None = None) -> SubBatches:
        trainer, handle = self.trainer, self.trainer.padding.handle
        return SubBatches(
            budget,
            sharing=bool(handle and handle.prefix_sharing),
            # Processes that shard a model meet in every forward, so all need equally many.
            sync_count=(lambda count: max_over_processes(trainer, count)) if is_sharded(trainer) else None,
            share_across_sub_batches=self.share_across_micro_batches and not is_sharded(trainer),
            checked_models=self._checked_models,
            images=images or self._images_of_step(),
        )

    def _images_of_step(self) -> ImageCounts | None:
        """The images of the rows of the running step, by TRL or by the collator; `None` without images."""
        step = self.trainer.padding.running
        if step is None or not isinstance(step.inputs, Mapping):
            return None
        if counts := numbered_images(step.inputs):
            return counts
        metadata = step.batch_metadata
        if metadata is None or not metadata.num_images or not metadata.unmodified(step.inputs, "input_ids"):
            return None
        # Chosen and rejected rows have the same images.
        blocks = len(step.inputs["input_ids"]) // len(metadata.num_images)
        return {"num_images": metadata.num_images * blocks}

    def compute_loss(
        self, compute: Callable, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """
        TRL's `compute_loss`, `compute`, in micro-batches if the loss is a weighted sum over them.

        Each micro-batch runs its backward here; Trainer runs that of the last one.
        """
        trainer, task = self.trainer, self.trainer.padding.task
        if self.budget is None or not self._is_sum_over_rows(inputs):
            return compute(model, inputs, *args, **kwargs)
        sub_batches = self._sub_batches(self.budget)
        ids = task.padded_batches(inputs)[0]["input_ids"]
        if not sub_batches.can_split(inputs, len(ids)):
            return compute(model, inputs, *args, **kwargs)
        split = sub_batches.split(*task.padded_batches(inputs)[0].values())
        if len(split.rows) == 1 and trainer.accelerator.num_processes == 1:
            return compute(model, inputs, *args, **kwargs)
        with task.with_sub_batches(inputs, sub_batches) as inputs:
            micro_batches = [select_rows(inputs, rows, len(ids), sub_batches.images) for rows in split.rows]
            ids_and_masks = [tuple(task.padded_batches(batch)[0].values()) for batch in micro_batches]
            loss = finished = torch.zeros((), device=trainer.args.device)
            with self._run(MicroBatchRunner(len(micro_batches), split.plan, ids_and_masks)) as metrics:
                for i, batch in enumerate(micro_batches):
                    num_items, weight = task.num_metric_items(batch), task.sub_batch_weight(batch, inputs)
                    with self._micro_batch(i, model), metrics.micro_batch(num_items, reduces=False):
                        loss = compute(model, batch, *args, **kwargs) * weight
                        if i < len(micro_batches) - 1:
                            with torch.autocast(loss.device.type, enabled=False):
                                # `around_step` applies the weight to the loss that is returned, and not to this one.
                                trainer.accelerator.backward(loss if self.weight is None else loss * self.weight)
                            finished = finished + loss.detach()
        metrics.log()
        return loss + finished

    @contextlib.contextmanager
    def _run(self, runner: MicroBatchRunner) -> Iterator[StepMetrics]:
        """A block with the micro-batches of a step, one after another."""
        assert self.budget is not None
        runner.embeddings = self._sub_batches(self.budget)
        with temporarily_set(self, "running", runner), within(runner=runner):
            yield StepMetrics(self.trainer)
        runner.check()
        if runner.modified:
            logger.warning_once(
                "A micro-batch was modified after its step was planned: from there on each micro-batch of such a step "
                "computes the prefixes that it shares with others again."
            )
        if runner.plan is not None and self.trainer.state.global_step == 0:
            logger.info(runner.plan.summary)

    @contextlib.contextmanager
    def around_training_step(self) -> Iterator[None]:
        """
        A block with the forwards and backwards of a step. If it raises, gradients are those of before.

        The micro-batches before the one that failed have had their backward. A `training_step` that skips a batch
        which does not fit into memory would otherwise update the weights by a part of the batch.
        """
        if self.budget is None:
            yield
            return
        for handle in self.trainer.padding.handles:
            handle.token_budget = self.budget  # `auto_find_batch_size` may have lowered it
        self.trainer.padding.gradient_hook = gradient_hook_name(self.trainer)  # a callback may have registered one
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        # Backward adds to gradients in place. Trainer has set them to `None`, so that a copy is rare.
        saved = {p: p.grad.clone() for p in parameters if p.grad is not None}
        try:
            with observe_own_loss(self.trainer):
                yield
        except BaseException:
            for parameter in parameters:
                parameter.grad = saved.get(parameter)
            raise

    @contextlib.contextmanager
    def _micro_batch(self, index: int, model: torch.nn.Module) -> Iterator[None]:
        """A block with one micro-batch of the running step."""
        assert self.running is not None
        self.running.start(index)
        with sync_gradients_in_last(self.trainer, model, is_last=index == self.running.count - 1):
            yield

    def _is_sum_over_rows(self, inputs: dict[str, Any]) -> bool:
        """Whether the loss of a batch is a sum over its rows with known weights."""
        trainer, task = self.trainer, self.trainer.padding.task
        is_training = torch.is_grad_enabled() and trainer.model.training
        if not (is_training and task.needs_all_rows()):
            return False
        is_trusted = custom_loss_name(trainer) is None and trainer.padding.gradient_hook is None
        is_step = trainer.args.gradient_accumulation_steps == 1
        return is_trusted and is_step and task.sub_batch_weight(inputs, inputs) is not None

    @cached_property
    def share_across_micro_batches(self) -> bool:
        """Whether prefixes are computed once in a step, and not by each micro-batch; logged once if they cannot be."""
        if self.budget is None:
            return False
        # Under FSDP2 all processes can plan equal numbers of forwards; ZeRO-3 and FSDP1 expect one order of modules.
        trainer, task = self.trainer, self.trainer.padding.task
        can_match = is_fsdp2(trainer) and not task.needs_all_rows()
        for model in map(task.scoring_module, models_of(trainer)):
            parameters = inspect.signature(type(find_pretrained(model)).forward).parameters
            can_match = can_match and "logits_to_keep" in parameters
        return can_share_across_micro_batches(
            trainer.padding.handles, trainer.args, is_sharded(trainer) and not can_match
        )

    def around_ref_logps(self) -> contextlib.AbstractContextManager[None]:
        return self.split_forwards()

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        with self.split_forwards():  # not of a micro-batch
            yield
        if self.weight is not None:
            step.result = step.result * self.weight

    def training_step(self, train: Callable, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's `training_step`, `train`."""
        return train(model, inputs, *args, **kwargs)

    def train_in_turns(self, train: Callable, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A user's `training_step`, `train`, which computes its loss itself."""
        return train(model, inputs, *args, **kwargs)

    def note_step(self, batches: Sequence[Any]) -> None:
        """Called with the batches of a step, before code of a user modifies them."""

    def whole_batch(self, inputs: Any) -> Any:
        """The batch that a loss gets."""
        return inputs

    def set_epoch(self, epoch: int) -> None:
        """Called after each step of the `epoch`, before anything is logged or saved."""


class MicroBatchBudget(SubBatchBudget):
    """`max_tokens_per_batch` for the micro-batches of a step, in the order of a [`StepOrder`]."""

    verifies_whole = False
    """Whether a claim is being verified, with the loss of all rows of a step."""

    _claim_is_verified = False

    sizes_of_trl: Sequence[int] = ()
    """Items of each of TRL's micro-batches in the last step of the data loader."""

    _epoch: float | None = None
    """The epoch that the last step has set."""

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        super().check(config, init_kwargs)
        if self.settings.max_tokens_per_batch is None:
            return
        if config.gradient_accumulation_steps > 1:
            raise ValueError(
                f"`max_tokens_per_batch` was set after the configuration was made, with "
                f"`gradient_accumulation_steps={config.gradient_accumulation_steps}`. The budget determines the "
                "number of micro-batches: pass it to the configuration, which computes the batch of a step from both."
            )
        if config.accelerator_config.split_batches or not config.accelerator_config.even_batches:
            raise ValueError(
                "`max_tokens_per_batch` gives equally many rows to every process: leave `split_batches` and "
                "`even_batches` out of `accelerator_config`."
            )
        if config.neftune_noise_alpha is not None:
            raise ValueError(
                f"`neftune_noise_alpha={config.neftune_noise_alpha}` adds noise whose size depends on the length of a "
                "padded batch, and `max_tokens_per_batch` makes other batches. Leave one of them out."
            )
        data = init_kwargs.get("train_dataset")
        is_stream = isinstance(data, IterableDataset)
        has_images = is_stream and bool(column_names(data) & {"image", "images"})
        if has_images or not (is_stream or isinstance(data, Dataset | None)):
            images = " with images, whose tokens are counted before the first step" if has_images else ""
            raise ValueError(
                f"`max_tokens_per_batch` splits steps by the tokens of their rows, and the training dataset is a "
                f"`{type(data).__name__}`{images}. Give a `datasets.Dataset` (of a stream `Dataset.from_generator`), "
                "or leave the budget out."
            )

    @contextlib.contextmanager
    def around_dataloader(self, dataset: Dataset | IterableDataset, is_training: bool) -> Iterator[None]:
        if not is_training or self.budget is None:
            yield
            return
        self._check_loss()  # a loss may have been set on the trainer since
        trainer, task, order = self.trainer, self.trainer.padding.task, self.trainer.padding.part(StepOrder)
        is_stream = not isinstance(dataset, Dataset)
        rows = dataset if is_stream else trainer._remove_unused_columns(dataset, description="training")
        steps = order.fix_steps(rows if _has_images(trainer) else None)
        collator = BudgetCollator(
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
        )
        if order.has_custom_collator or (order.images is not None and is_custom_collator(order.collator)):
            logger.warning(_what_collator_gets(order.images is not None, task.needs_all_rows()))
        # An item is a step of a process; the plan has left out the rows that are dropped.
        items = order.stream(rows, self.budget) if is_stream else StepDataset(rows, steps)
        fields = {"train_dataset": items, "data_collator": collator, "_train_batch_size": 1}
        config = trainer.accelerator.dataloader_config
        with contextlib.ExitStack() as stack:
            for name, value in fields.items():
                stack.enter_context(temporarily_set(trainer, name, value))
            stack.enter_context(temporarily_set(trainer.args, "dataloader_drop_last", False))
            if is_stream:  # accelerate would cut the tensors of a step, and knows none of its micro-batches
                stack.enter_context(temporarily_set(config, "dispatch_batches", False))
            yield

    def training_step(
        self, train: Callable, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's `training_step`, `train`, on each micro-batch of a step, as [`BudgetCollator`] makes them."""
        if self.budget is None:
            return train(model, inputs, *args, **kwargs)
        if computes_own_loss(train):  # of a class below ours, or patched onto TRL's
            return self.train_in_turns(train, model, inputs, *args, **kwargs)
        if (step := step_of(inputs)) is None:
            step = self._step_of_user(inputs)
        micro_batches: list[MicroBatch] = list(zip(step.micro_batches, step.weights, strict=True))
        task = self.trainer.padding.task
        if task.needs_all_rows() and len(micro_batches) > 1 and not step.keeps_micro_batches:
            name = custom_loss_name(self.trainer) or self.trainer.padding.gradient_hook
            raise ValueError(
                f"`{name}` was set during training, and the rows of this step were split already: its value for "
                "all rows of a micro-batch is not known from their parts. Set it before `train()`."
            )
        # Trainer passes `num_items_in_batch`: the loss then divides by the tokens of the step itself. A
        # `get_batch_samples` of a user may count for losses without labels, which take no such number.
        has_count = any(value is not None for value in (*args, *kwargs.values()))
        counts_tokens = has_count and "labels" in micro_batches[0][0]
        if step.keeps_micro_batches or task.needs_all_rows():
            return self._train_whole(train, model, micro_batches, counts_tokens, *args, **kwargs)
        turns = list(step.micro_batches_of_trl)
        for batch, _ in micro_batches if turns else ():  # a column meanwhile, which is cut with the others
            batch[_TURNS] = [turns.pop(0) for _ in range(len(batch["input_ids"]) // task.rows_per_item)]
        micro_batches = self._to_equal_counts(micro_batches)
        turns_of = [batch.pop(_TURNS, None) for batch, _ in micro_batches]
        weights: list[Any] = [None if counts_tokens and weight else weight for _, weight in micro_batches]
        if reduction := self._claimed_reduction():
            counts_tokens = False  # of the loss itself nothing is known but the claim
            batches, shares = zip(*micro_batches, strict=True)
            weights = claimed_weights(reduction, batches, shares, task.num_label_tokens)
            if not self._claim_is_verified and len(batches) > 1:
                self._verify_claim(reduction, model, batches, weights, *args, **kwargs)
                self._claim_is_verified = True
        loss = torch.zeros((), device=self.trainer.args.device)
        with self._run(self._runner(micro_batches, step)) as metrics, temporarily_set(self, "weight", None):
            for i, (batch, weight) in enumerate(micro_batches):
                # A micro-batch with weight 0 only matches the forwards of other processes.
                self.weight = weights[i]
                num_items = self._num_items(batch, weight, counts_tokens)
                with self._micro_batch(i, model), metrics.micro_batch(num_items, turns=turns_of[i]):
                    loss = loss + train(model, batch, *args, **kwargs)
        unweighted = [batch for batch, weight in micro_batches if not weight]
        masks = [batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in unweighted]
        metrics.log(sum(int(mask.sum()) for mask in masks), step.count_of_trl)
        return loss

    def _to_equal_counts(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """
        As many micro-batches as the process with most of them has, those with images last.

        DDP reduces the gradients of what the last backward used: of the vision tower, too.

        Raises:
            ValueError: If processes that shard a model would wait for one without images in its vision tower.
        """
        trainer, rows_per_item = self.trainer, self.trainer.padding.task.rows_per_item
        of_kind = [[m for m in micro_batches if has_pixels(m[0]) == kind] for kind in (False, True)]
        if trainer.padding.part(StepOrder).images is None or not is_sharded(trainer):
            count = max_over_processes(trainer, len(micro_batches))
            return sorted(to_equal_count(micro_batches, count, rows_per_item), key=lambda m: has_pixels(m[0]))
        texts, images = (max_over_processes(trainer, len(kind)) for kind in of_kind)
        if images and not of_kind[1]:
            raise ValueError(
                f"No row of process {trainer.accelerator.process_index} has an image in step "
                f"{trainer.state.global_step + 1}, and processes that shard a model (FSDP, ZeRO-3) meet in its vision "
                "tower. As with TRL alone, each batch of each process needs a row with an image."
            )
        if texts and not of_kind[0]:  # its text computes the same layers, and counts for nothing
            of_kind[0] = [(without_images(of_kind[1][0][0]), 0.0)]
        counted = zip(of_kind, (texts, images), strict=True)
        return [m for kind, count in counted if count for m in to_equal_count(kind, count, rows_per_item)]

    def _step_of_user(self, inputs: Any) -> CollatedStep:
        """
        The micro-batches of TRL, of a batch that a user's code has made or modified. Their forwards are split.

        Raises:
            ValueError: If they cannot be made of it, or forwards cannot be split.
        """
        trainer, rows_per_item = self.trainer, self.trainer.padding.task.rows_per_item
        size = trainer.args._rows_per_micro_batch
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "`max_tokens_per_batch`: code of yours has modified the batch of a step, or computes its loss in a "
                "`training_step`, so forwards are split and computed again in the backward pass, which DeepSpeed does "
                "not do. Modify the batch in `compute_loss`, compute the loss there, or leave the budget out."
            )
        if not _joins_micro_batches(trainer):
            if _has_images(trainer):
                logger.warning_once(
                    "`max_tokens_per_batch`: code of yours has modified a batch with images, which are not numbered "
                    "by row, so it is computed as one, whatever its tokens."
                )
            return CollatedStep([inputs], [1.0], [], keeps_micro_batches=True)
        plain = pop_metadata(inputs)[0]
        count = len(plain["input_ids"]) // rows_per_item
        if any(not isinstance(v, torch.Tensor | list) or len(v) % count for v in plain.values()):
            raise ValueError(
                f"`max_tokens_per_batch`: code of yours has modified the batch of a step ({', '.join(plain)}), and "
                f"not all of its values have a row for each of {count}: the micro-batches of "
                "`gradient_accumulation_steps` cannot be cut from it. Modify it in `compute_loss`, or leave the "
                "budget out."
            )
        # A collator of a user may have dropped rows of a micro-batch, or added some.
        sizes = self.sizes_of_trl if sum(self.sizes_of_trl) == count else [size] * -(-count // size)
        ends = [*accumulate(sizes)]
        parts = [range(end - size, min(end, count)) for size, end in zip(sizes, ends, strict=True)]
        batches = [items_of(plain, part, count) for part in parts]
        return CollatedStep(batches, [1 / len(parts)] * len(parts), [], keeps_micro_batches=True)

    def note_step(self, batches: Sequence[Any]) -> None:
        step = step_of(batches[0]) if batches else None
        self.sizes_of_trl = () if step is None else step.sizes_of_trl

    def train_in_turns(self, train: Callable, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        trainer, config, step = self.trainer, self.trainer.args, step_of(inputs)
        # Within a step of TRL's micro-batches already, one of which has been passed on to another user's step.
        if not _joins_micro_batches(trainer) or config.gradient_accumulation_steps > 1:
            return train(model, inputs, *args, **kwargs)
        if step is None or not step.keeps_micro_batches:
            step = self._step_of_user(inputs)
        turns, loss = step.micro_batches, torch.zeros((), device=config.device)
        # Numbers of TRL, by which such a step divides its loss.
        accumulated = config.per_device_train_batch_size // config._rows_per_micro_batch
        with (
            temporarily_set(config, "gradient_accumulation_steps", accumulated),
            temporarily_set(trainer, "current_gradient_accumulation_steps", len(turns)),
        ):
            for i, batch in enumerate(turns):
                with sync_gradients_in_last(trainer, model, is_last=i == len(turns) - 1):
                    loss = loss + train(model, batch, *args, **kwargs)
        return loss

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the trainer's state to that of TRL after as many steps; `epoch` began last."""
        state, order = self.trainer.state, self.trainer.padding.part(StepOrder)
        # Set once in each step: transformers has counted one batch of the data loader for each.
        if self.budget is None or not order.steps or not order.steps.rows or state.epoch == self._epoch:
            return
        steps = round((state.epoch - epoch) * len(order.steps) / order.steps.processes)
        state.epoch = self._epoch = epoch + order.steps.share_of_epoch(steps)

    def whole_batch(self, inputs: Any) -> Any:
        """
        The batch of all rows of a step, for a `training_step` of a user that computes its loss itself.

        Raises:
            ValueError: If the step has several micro-batches of TRL.
        """
        step = step_of(inputs)
        if step is None:
            return inputs
        is_loss = self.trainer.padding.task.needs_all_rows() or torch.is_grad_enabled()
        if is_loss and _joins_micro_batches(self.trainer):
            raise ValueError(
                "With `max_tokens_per_batch` a batch has all rows of a step, and a `training_step` of yours computes "
                "one loss of it, where TRL has one for each of `gradient_accumulation_steps`. Call "
                "`super().training_step`, which computes them in turn, or leave the budget out."
            )
        return BatchWithMetadata(StepBatch((), step))

    def _train_whole(
        self,
        train: Callable,
        model: torch.nn.Module,
        micro_batches: list[MicroBatch],
        counts_tokens: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The micro-batches of TRL one after another; their forwards are split, and TRL averages their metrics."""
        loss = torch.zeros((), device=self.trainer.args.device)
        for i, (batch, weight) in enumerate(micro_batches):
            is_last = i == len(micro_batches) - 1
            with (
                temporarily_set(self, "weight", None if counts_tokens else weight),
                sync_gradients_in_last(self.trainer, model, is_last),
            ):
                loss = loss + train(model, batch, *args, **kwargs)
        return loss

    def _claimed_reduction(self) -> str | None:
        """What the user says of a custom loss. That of TRL needs no claim."""
        return self.settings.loss_reduction if custom_loss_name(self.trainer) else None

    def _verify_claim(
        self,
        reduction: str,
        model: torch.nn.Module,
        batches: Sequence[dict[str, Any]],
        weights: Sequence[Any],
        *args: Any,
        **how: Any,
    ) -> None:
        """
        Compare the loss of all rows with that of the micro-batches, and the norms of their gradients.

        Nothing of it is trained on or logged. Where processes shard gradients, only the losses are compared.

        Raises:
            ValueError: If they differ.
        """
        trainer = self.trainer
        shards = is_sharded(trainer) or trainer.is_deepspeed_enabled
        parameters = [] if shards else [p for p in trainer.model.parameters() if p.requires_grad]
        num_items = next(iter((*args, *how.values())), None)

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
            with temporarily_set(self, "verifies_whole", True):
                expected = loss_and_norm((loss(whole, None) for _ in range(1)), parameters)
            with self._run(MicroBatchRunner(len(batches))):
                losses = (loss(pop_metadata(b)[0], w) for b, w in zip(batches, weights, strict=True))
                found = loss_and_norm(losses, parameters)
        if differs(expected, found, next(trainer.model.parameters()).dtype):
            raise ValueError(
                f"`loss_reduction={reduction!r}` is not what `{custom_loss_name(trainer)}` computes: on the first "
                f"step its loss is {expected[0]:.6f} for all rows at once (gradient norm {expected[1]:.6f}), and "
                f"{found[0]:.6f} ({found[1]:.6f}) from {len(batches)} micro-batches with this reduction. Set the "
                "right one of 'rows', 'tokens' and 'sum', or leave it out: the loss then gets all rows of a step."
            )

    def _num_items(self, batch: dict[str, Any], weight: float, counts_tokens: bool) -> dict[str, Any]:
        """Number of items that each metric of a micro-batch is a mean over; `""` stands for all other metrics."""
        task = self.trainer.padding.task
        others = task.num_loss_items(batch) if counts_tokens else weight
        return {"": others, **task.num_metric_items(batch)} if weight else {"": 0}

    def _runner(self, micro_batches: list[MicroBatch], step: CollatedStep) -> MicroBatchRunner:
        """The runner of a step; its micro-batches share prefixes if they have any in common."""
        if not self.share_across_micro_batches or len(micro_batches) == 1:
            return MicroBatchRunner(len(micro_batches))
        plan = step.prefix_plan if len(micro_batches) == len(step.micro_batches) else STALE_PLAN
        gather = gather_object if is_sharded(self.trainer) else None
        assert self.budget is not None
        return MicroBatchRunner.of([batch for batch, _ in micro_batches], plan, self.budget, gather)


def _joins_micro_batches(trainer: PaddingFreeTrainer) -> bool:
    """Whether a batch of the data loader has several micro-batches of TRL, for a budget."""
    return trainer.args.per_device_train_batch_size > getattr(trainer.args, "_rows_per_micro_batch", math.inf)


def _budget_obstacle(trainer: PaddingFreeTrainer) -> str | None:
    """Why the loss of a batch depends on which rows are in one forward, or `None` if it does not."""
    task = trainer.padding.task
    if reason := task.token_budget_obstacle():
        return reason
    accumulated = _joins_micro_batches(trainer)
    if (hook := trainer.padding.gradient_hook) and (accumulated or trainer.args.gradient_accumulation_steps > 1):
        return (
            f"`{hook}` acts in the backward pass, of which TRL has several in a step (`gradient_accumulation_steps`)"
        )
    all_rows = f"`{hook}` acts in the backward pass" if hook else "The loss compares rows (or is your own)"
    if claim := trainer.padding.settings.loss_reduction:
        if task.needs_all_rows():
            return f"`loss_reduction={claim!r}` is about a loss in micro-batches. {all_rows}"
        if accumulated and claim != "rows" and custom_loss_name(trainer):
            return (
                f"`loss_reduction={claim!r}`: TRL averages over several such losses in a step "
                "(`gradient_accumulation_steps`), and a token weighs otherwise in each of them"
            )
        if _has_images(trainer) and custom_loss_name(trainer):
            return f"`loss_reduction={claim!r}` cannot be verified, because images are not numbered by row"
    if task.needs_all_rows() and trainer.is_deepspeed_enabled:
        return f"{all_rows}, and DeepSpeed does not compute forwards a second time within a backward"
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


def _what_collator_gets(has_images: bool, all_rows: bool) -> str:
    """What a collator that is not TRL's gets under a budget."""
    if all_rows:
        batches = "all rows of a step, whatever `gradient_accumulation_steps` was"
    elif has_images:
        batches = "each micro-batch of the budget by itself, because images are not numbered by row"
    else:
        batches = "the rows that it gets without a budget, and the batch that it makes is split by rows"
    return f"`max_tokens_per_batch`: the collator is not TRL's and may look at its whole batch. It gets {batches}."


def _has_images(trainer: PaddingFreeTrainer) -> bool:
    return any(column_names(dataset) & {"image", "images"} for dataset in datasets_of(trainer).values())
