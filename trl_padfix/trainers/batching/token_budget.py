"""
`max_tokens_per_batch` for the forwards of one batch, and of an evaluation.

A loss that compares the rows of a forward, or balances experts over it, is computed from a whole batch: its forwards
are run in sub-batches (`sub_batches.py`). If rows are compared without gradients only (the KL term of KTO, the
advantages of GRPO), the loss is a sum over rows with known weights, and is computed in micro-batches.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from accelerate.logging import get_logger

from ...core.call.runner_patch import attach_runner_patch
from ...core.context import within
from ...core.model.find import find_pretrained
from ...core.model.patching import Attachment
from ..backward_hooks import gradient_hook_name
from ..custom_loss import custom_loss_name, observe_user_loss
from ..data.image_rows import ImageCounts, numbered_images, select_rows
from ..distributed import is_fsdp2, is_sharded, max_over_processes, models_of, sync_gradients_in_last
from ..parts import Part, Step
from ..settings import check_token_budget
from ..temporary_attributes import temporarily_set
from .budget_checks import check_loss
from .prefix_schedule import MicroBatchRunner, can_share_across_micro_batches
from .step_metrics import StepMetrics
from .sub_batches import SubBatches


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..parts import PaddingFreeTrainer


__all__ = ["SubBatchBudget"]

logger = get_logger(__name__)


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
        self.trainer.padding.gradient_hook = gradient_hook_name(self.trainer)
        check_loss(self.trainer)

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

        Within a micro-batch forwards are not split again. `concatenated`: ids and mask of the forward, if the loss
        concatenates them into new tensors. `images`: images of the rows, by default those of the running step.
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
        """Images of the rows of the running step, as TRL has counted them; `None` without images."""
        step = self.trainer.padding.running
        if step is None or not isinstance(step.inputs, Mapping):
            return None
        return numbered_images(step.inputs) or None

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
        A block with the forwards and backwards of a step. If it raises, gradients are restored.

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
        # Copies, because backward adds to gradients in place. They are rare: Trainer has set most gradients to `None`.
        saved = {p: p.grad.clone() for p in parameters if p.grad is not None}
        try:
            with observe_user_loss(self.trainer):
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
        with self.split_forwards():  # does nothing within a micro-batch
            yield
        if self.weight is not None:
            step.result = step.result * self.weight

    def training_step(self, train: Callable, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """TRL's `training_step`, `train`."""
        return train(model, inputs, *args, **kwargs)

    def train_by_trl_micro_batch(
        self, train: Callable, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A user's `training_step`, `train`, which computes its loss itself."""
        return train(model, inputs, *args, **kwargs)

    def note_step(self, batches: Sequence[Any]) -> None:
        """Called with the batches of a step, before code of a user modifies them."""

    def set_epoch(self, epoch: int) -> None:
        """Called after each step of the `epoch`, before anything is logged or saved."""
