"""
`max_tokens_per_batch`: splits TRL's batch within a token budget, and changes nothing else in a step.

[`TokenBudget.compute_loss`] gets the batch that TRL's `compute_loss` gets. If its loss is a sum over rows with known
weights, the rows run in chunks, each with forward and backward; Trainer runs the backward of the last.
Any other loss gets the outputs of all rows from forwards in parts, which its backward recomputes (`part_runner.py`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import Trainer

from ...core.anatomy import find_pretrained
from ...core.context import context, temporarily_set, within
from ...core.model.patching import Attachment
from ...core.remove import attach_runner_patch
from ..checks.arguments import rope_kind_beyond
from ..checks.user_code import (
    custom_loss_name,
    custom_method,
    gradient_hook_name,
    hook_beside_loss,
    module_hook_names,
)
from ..data.batch_rows import BatchParts, ImageCounts, are_cut_by_rows, find_images, has_pixels, scored_tokens
from ..distributed import (
    has_static_graph,
    is_fsdp2,
    is_sharded,
    is_zero,
    max_over_processes,
    models_of,
    splitting_parallelism,
    step_on_prepared,
    sync_gradients_in_last,
)
from ..parts.part import PaddingFreeTrainer, Part, Step
from ..parts.saved_state import kept_trainable
from ..task import Task
from .bin_packing import RowSplitter
from .chunk_metrics import ChunkMetrics
from .merged_output import LossChecks
from .part_runner import PartRunner
from .prefix_schedule import shares_across_parts


__all__ = ["TokenBudget"]

logger = get_logger(__name__)


class TokenBudget(Part):
    """`max_tokens_per_batch`, which bounds the tokens of each forward."""

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._attached: list[Attachment] = []
        self._loss_checks = LossChecks()
        self._is_in_step = False
        self._gradient_hook: str | None = None

    @property
    def budget(self) -> int | None:
        """
        Maximum number of tokens of a forward; `None` without one, and once padding removal is undone.

        If `auto_find_batch_size` has lowered the batch size after a forward did not fit into memory, the budget is
        lowered by the same factor, because memory depends on tokens.
        """
        budget, args = self.settings.max_tokens_per_batch, self.trainer.args
        if self.trainer.padding.is_restored:
            return None
        if budget is None or not args.auto_find_batch_size:  # Trainer ignores another number that is set in `args`
            return budget
        return max(budget * self.trainer._train_batch_size // args.train_batch_size, 1)

    def acts(self) -> bool:
        return self.settings.max_tokens_per_batch is not None

    # -- checks

    def attach(self) -> None:
        trainer = self.trainer
        if splitting_parallelism(trainer.accelerator, "tp_size"):
            raise ValueError(
                "`max_tokens_per_batch` splits the batch of a process, but under tensor parallelism several processes "
                "compute one batch. Leave `max_tokens_per_batch` out."
            )
        if has_static_graph(trainer):
            raise ValueError(
                "`max_tokens_per_batch` splits a backward into several, and with `ddp_static_graph=True` DDP expects "
                "one. Set `ddp_static_graph=False`."
            )
        if kind := rope_kind_beyond(trainer.model, vars(trainer.args).get("max_length")):
            raise ValueError(
                f"The model's {kind!r} rotary embedding depends on the longest row of a forward, and "
                "`max_tokens_per_batch` splits forwards. Leave the budget out, or lower `max_length`."
            )

    def around_dataloader(self, dataset: Any, is_training: bool) -> contextlib.AbstractContextManager[None]:
        if is_training and self.budget is not None:  # a loss may have been set on the trainer after its `__init__`
            self._gradient_hook = gradient_hook_name(self.trainer)
            self._check_recomputation()
        return contextlib.nullcontext()

    def _check_recomputation(self) -> None:
        """
        Warn of losses whose forwards are recomputed in backward, and of hooks of modules.

        Raises:
            ValueError: If DeepSpeed would have to recompute forwards.
        """
        trainer, reason = self.trainer, self.why_all_rows()
        if reason and trainer.is_deepspeed_enabled:
            raise ValueError(
                f"{reason}, so `max_tokens_per_batch` would recompute forwards in the backward pass, which "
                "DeepSpeed does not do. Leave `max_tokens_per_batch` out."
            )
        if hook_beside_loss(trainer) is not None:  # a batch runs padded and unsplit
            return
        if reason:
            logger.warning_once(
                f"`max_tokens_per_batch`: {reason}, so the loss gets the outputs of all rows at once. The backward "
                "pass then computes all sub-batches but one again."
            )
        if hooks := module_hook_names(trainer.model):
            logger.warning_once(
                f"`max_tokens_per_batch`: {hooks[0]} is a hook of a module. It runs once for each sub-batch, on the "
                "states or gradients of that sub-batch."
            )

    def why_all_rows(self) -> str | None:
        """Why the loss of this trainer is not known to be a sum over rows, for any batch; `None` if it may be."""
        trainer = self.trainer
        if name := custom_loss_name(trainer) or custom_method(trainer, {"training_step"}, below=True):
            return f"`{name}` may compare rows"
        if type(trainer.padding.task).chunk_weight is Task.chunk_weight:
            return f"the loss of {type(trainer).__name__} may compare rows"
        if trainer.padding.task.balances_experts():
            return "the load of experts is balanced over all rows"
        # A hook in a backward (one that clamps gradients) must get the gradient of the whole batch: one backward.
        return self._gradient_hook and f"`{self._gradient_hook}` acts in the backward pass"

    # -- models

    def attach_to_models(self) -> None:
        self.restore()
        for handle in self.trainer.padding.handles:
            handle.token_budget = self.budget
        scoring_module = self.trainer.padding.task.scoring_module
        self._attached = [attach_runner_patch(scoring_module(model)) for model in models_of(self.trainer)]

    def restore(self) -> None:
        for attachment in self._attached:
            attachment.remove()

    @property
    def _matches(self) -> bool:
        """Whether processes meet in every backward, and so need equal numbers of backwards."""
        return is_sharded(self.trainer) or is_zero(2, self.trainer.accelerator)

    def _shares_across(self) -> bool:
        """Whether prefixes are computed once per batch instead of once per part; logs once if they cannot be."""
        # Asked in each step: user code may switch gradient checkpointing on at any time.
        # Under FSDP2 all processes can plan equal numbers of forwards; ZeRO-3 and FSDP1 expect one order of modules.
        trainer, is_unequal = self.trainer, is_sharded(self.trainer)
        if is_unequal and is_fsdp2(trainer) and self.why_all_rows() is None:
            models = map(find_pretrained, map(trainer.padding.task.scoring_module, models_of(trainer)))
            is_unequal = any("logits_to_keep" not in inspect.signature(type(m).forward).parameters for m in models)
        return shares_across_parts(trainer.padding.handles, trainer.args, is_unequal)

    def _leaves_whole(self) -> bool:
        """Whether a batch is computed padded and unsplit: because of the parity check, or a hook of the user."""
        return self.trainer.padding.why_padded is not None or hook_beside_loss(self.trainer) is not None

    def _on_any_process(self, flag: bool) -> bool:
        """Whether `flag` is set here, or on any process that meets this one in a backward."""
        return bool(max_over_processes(self.trainer, int(flag)) if self._matches else flag)

    # -- forwards in sub-batches

    def split_forwards(
        self, *concatenated: torch.Tensor, images: ImageCounts | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """
        A block of TRL's forwards, which run packed, and in sub-batches if there is a budget.

        Within a chunk forwards are not split again. `concatenated`: ids and mask of the forward, if the loss
        concatenates them into new tensors. `images`: images of the rows, by default the images of the running step.
        """
        if isinstance(runner := context().runner, PartRunner) and runner.parts is not None:
            if concatenated:
                runner.set_inputs(*concatenated)
            return contextlib.nullcontext()
        if self.budget is None or self._on_any_process(self._leaves_whole()):
            return within(unchecked=None)
        step = self.trainer.padding.running
        if not images and step is not None and isinstance(step.inputs, Mapping) and has_pixels(step.inputs):
            ids = next((batch["input_ids"] for batch in step.batches if "input_ids" in batch), None)
            images = None if ids is None else find_images(step.inputs, ids, find_pretrained(self.trainer.model).config)
        return within(runner=self._runner(images or None), unchecked=None)

    def _runner(self, images: ImageCounts | None, parts: BatchParts | None = None) -> PartRunner:
        return PartRunner(self._splitter(), images, self._loss_checks, parts, with_head=is_sharded(self.trainer))

    def _splitter(self, by_part: bool = False) -> RowSplitter:
        trainer, handle, budget = self.trainer, self.trainer.padding.handle, self.budget
        assert budget is not None
        return RowSplitter(
            budget,
            sharing=bool(handle and handle.prefix_sharing),
            shares_across=self._shares_across if by_part or not is_sharded(trainer) else bool,
            sync_count=partial(max_over_processes, trainer) if self._matches else int,
            gather=gather_object if by_part and self._matches else None,
            meets_in_tower=self._matches and handle is not None and handle.multimodal is not None,
        )

    def around_step(self, step: Step | None = None) -> contextlib.AbstractContextManager[None]:
        return self.split_forwards()

    around_ref_logps = around_step

    # -- a batch in chunks

    def compute_loss(
        self, compute: Callable, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run `compute`, TRL's `compute_loss`: in chunks if the loss is a sum over rows with known weights."""
        trainer, task = self.trainer, self.trainer.padding.task
        compute = partial(compute, task.model_for_loss(model))
        call = inspect.signature(Trainer.compute_loss).bind(trainer, model, inputs, *args, **kwargs).arguments
        num_items, has_others = call.get("num_items_in_batch"), trainer.accelerator.num_processes > 1
        has_backward = self._is_in_step and torch.is_grad_enabled() and trainer.model.training
        parts = None
        if self.budget is not None and has_backward and not call.get("return_outputs"):
            # All processes must agree; a hook may be on one of them only. `_parts_of` gathers where they meet.
            is_sum = not self._on_any_process(not self._is_sum_over_rows(inputs, num_items))
            parts = self._parts_of(inputs) if is_sum else None
            parts = None if max_over_processes(trainer, int(parts is None)) else parts
        if parts is None:
            return compute(inputs, *args, **kwargs)
        if len(parts.rows) == 1 and not has_others:
            # It fits, so its forwards need no plan of their own. KTO's KL term has other rows.
            is_only = len(task.padded_batches(inputs)) == 1
            with within(runner=None) if is_only else contextlib.nullcontext():
                return compute(inputs, *args, **kwargs)
        # A single process reduces nothing. All threads share accelerate's state, and another one may run a step.
        is_alone = not (has_others or trainer.is_deepspeed_enabled)
        runner, metrics = self._runner(parts.images, parts), ChunkMetrics(trainer)
        width = self._ids_and_mask(inputs)[0].shape[1]
        with task.around_chunks(inputs) as inputs, within(runner=runner):
            total: Any = 0.0
            for i, chunk in enumerate(parts.of(inputs)):
                is_last = i == len(parts.rows) - 1
                weight, items = task.chunk_weight(chunk, inputs, num_items), task.num_loss_items(chunk)
                loss = partial(compute, chunk, *args, **kwargs)
                ids, mask = self._ids_and_mask(chunk)
                runner.start(i, ids, mask)
                num_items_of = {"": weight if items is None else items} | task.num_metric_items(chunk)
                # Per chunk TRL switches checkpointing off and on, and each time transformers adds a hook that stays.
                no_hook = {} if is_last else {"enable_input_require_grads": lambda: None}
                with (
                    within(left_out=width - ids.shape[1]),
                    sync_gradients_in_last(trainer, model, is_last or is_alone),
                    metrics.chunk(num_items_of),
                    temporarily_set(find_pretrained(trainer.model), **no_hook),
                    contextlib.nullcontext() if is_last else kept_trainable(trainer.model),
                ):
                    total = total + (loss() * weight if is_last else self._backward(loss, weight, model, num_items))
        runner.check()
        metrics.log()
        return total

    def _parts_of(self, inputs: dict[str, Any]) -> BatchParts | None:
        """The parts of a batch; `None` if its values cannot be cut by rows."""
        task, (ids, mask) = self.trainer.padding.task, self._ids_and_mask(inputs)
        if mask is not None and mask.shape != ids.shape[:2]:  # a four-dimensional mask
            return None
        splitter = self._splitter(by_part=True)
        config = find_pretrained(self.trainer.model).config
        images, count, of_item = find_images(inputs, ids, config), len(ids), task.rows_per_item
        if not (splitter.can_split(inputs, count, images) and are_cut_by_rows(inputs, count, of_item)):
            return None
        return splitter.split(ids, mask, rows_per_item=of_item, scored=scored_tokens(inputs), images=images)

    def _ids_and_mask(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        forward = self.trainer.padding.task.padded_batches(batch)[0]
        return forward["input_ids"], forward.get("attention_mask")

    def _is_sum_over_rows(self, inputs: Any, num_items: Any) -> bool:
        """Whether the loss of a batch is a sum over rows, with known weights."""
        task = self.trainer.padding.task
        if self.why_all_rows() is not None or self._leaves_whole():
            return False
        has_ids = any("input_ids" in batch for batch in task.padded_batches(inputs))
        return has_ids and task.chunk_weight(inputs, inputs, num_items) is not None

    def _backward(self, compute: Callable, weight: Any, model: torch.nn.Module, num_items: Any) -> torch.Tensor:
        """
        The loss of a chunk, after its backward; transformers' `training_step` computes both, as for a batch.

        So this loss is scaled for accumulation, mixed precision and DeepSpeed exactly like the loss of the last chunk,
        which the running `training_step` gets.
        """
        trainer, losses = self.trainer, []

        def compute_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            losses.append(compute() * weight)
            return losses[-1]

        with temporarily_set(trainer, compute_loss=compute_loss):
            step_on_prepared(trainer, model, {}, num_items)
        return losses[0].detach()

    @contextlib.contextmanager
    def around_training_step(self) -> Iterator[None]:
        """
        A block with the forwards and backwards of a batch. If it raises, gradients are restored.

        When a chunk fails, the chunks before it have had their backward. A user's `training_step` that skips a batch
        too large for memory would otherwise update the weights by a part of the batch.
        """
        if (budget := self.budget) is None:
            yield
            return
        for handle in self.trainer.padding.handles:
            handle.token_budget = budget
        if budget != self.settings.max_tokens_per_batch:
            logger.warning_once(f"`auto_find_batch_size` also lowers `max_tokens_per_batch`, to {budget}.")
        self._gradient_hook = gradient_hook_name(self.trainer)  # a callback may have registered one
        # Copies, because backward adds to gradients in place; only where user code may catch the error.
        catches = custom_method(self.trainer, {"training_step"}) is not None
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad] if catches else []
        saved = {p: p.grad.clone() for p in parameters if p.grad is not None}
        try:
            with temporarily_set(self, _is_in_step=True):
                yield
        except BaseException:
            for parameter in parameters:
                parameter.grad = saved.get(parameter)
            raise
