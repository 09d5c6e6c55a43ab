"""
Steps under a token budget in which code of a user computes the loss, or modifies the batch.

Such code gets the batches that it has with TRL alone, `gradient_accumulation_steps` of them. Their forwards are run in
sub-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger

from ..distributed import sync_gradients_in_last
from ..temporary_attributes import temporarily_set
from .budget_checks import has_images, joins_micro_batches
from .micro_batches import CollatedStep, MicroBatch, StepBatch, items_of, step_of


if TYPE_CHECKING:
    from ..parts import PaddingFreeTrainer


__all__ = ["step_of_user", "train_by_trl_micro_batch", "whole_batch"]

logger = get_logger(__name__)


def step_of_user(trainer: PaddingFreeTrainer, inputs: Any, trl_sizes: Sequence[int]) -> CollatedStep:
    """
    Cut a batch that a user's code has made or modified into the micro-batches of TRL. Their forwards are split later.

    `trl_sizes`: number of items in each of TRL's micro-batches; empty if unknown.

    Raises:
        ValueError: If the batch cannot be cut, or forwards cannot be split.
    """
    rows_per_item, size = trainer.padding.task.rows_per_item, trainer.args._rows_per_micro_batch
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "`max_tokens_per_batch`: code of yours has modified the batch of a step, or computes its loss in a "
            "`training_step`, so forwards are split and computed again in the backward pass, which DeepSpeed does "
            "not do. Modify the batch in `compute_loss`, compute the loss there, or leave the budget out."
        )
    if not joins_micro_batches(trainer):
        if has_images(trainer):
            logger.warning_once(
                "`max_tokens_per_batch`: code of yours has modified a batch with images, which are not numbered "
                "by row, so it is computed as one, whatever its tokens."
            )
        return CollatedStep([MicroBatch(inputs, 1.0)], keeps_micro_batches=True)
    plain = inputs
    count = len(plain["input_ids"]) // rows_per_item
    if any(not isinstance(v, torch.Tensor | list) or len(v) % count for v in plain.values()):
        raise ValueError(
            f"`max_tokens_per_batch`: code of yours has modified the batch of a step ({', '.join(plain)}), and "
            f"not all of its values have a row for each of {count}: the micro-batches of "
            "`gradient_accumulation_steps` cannot be cut from it. Modify it in `compute_loss`, or leave the "
            "budget out."
        )
    # A collator of a user may have dropped rows of a micro-batch, or added some.
    sizes = trl_sizes if sum(trl_sizes) == count else [size] * -(-count // size)
    ends = [*accumulate(sizes)]
    parts = [range(end - size, min(end, count)) for size, end in zip(sizes, ends, strict=True)]
    micro_batches = [MicroBatch(items_of(plain, part, count), 1 / len(parts)) for part in parts]
    return CollatedStep(micro_batches, keeps_micro_batches=True)


def train_by_trl_micro_batch(
    trainer: PaddingFreeTrainer,
    trl_sizes: Sequence[int],
    train: Callable[..., Any],
    model: torch.nn.Module,
    inputs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The sum of what a user's `training_step`, `train`, returns for each micro-batch of TRL in a step."""
    config, step = trainer.args, step_of(inputs)
    # `gradient_accumulation_steps` as set below: a nested call, in which a user's step passes on TRL's micro-batch.
    if not joins_micro_batches(trainer) or config.gradient_accumulation_steps > 1:
        return train(model, inputs, *args, **kwargs)
    if step is None or not step.keeps_micro_batches:
        step = step_of_user(trainer, inputs, trl_sizes)
    micro_batches, loss = step.micro_batches, torch.zeros((), device=config.device)
    # A user's step divides its loss by these numbers, so they are set to those of TRL.
    accumulation_steps = config.per_device_train_batch_size // config._rows_per_micro_batch
    with (
        temporarily_set(config, "gradient_accumulation_steps", accumulation_steps),
        temporarily_set(trainer, "current_gradient_accumulation_steps", len(micro_batches)),
    ):
        for i, micro_batch in enumerate(micro_batches):
            with sync_gradients_in_last(trainer, model, is_last=i == len(micro_batches) - 1):
                loss = loss + train(model, micro_batch.batch, *args, **kwargs)
    return loss


def whole_batch(trainer: PaddingFreeTrainer, inputs: Any) -> Any:
    """
    The batch of all rows of a step, for a `training_step` of a user that computes its loss itself.

    Raises:
        ValueError: If the step has several micro-batches of TRL.
    """
    step = step_of(inputs)
    if step is None:
        return inputs
    computes_loss = trainer.padding.task.needs_all_rows() or torch.is_grad_enabled()
    if computes_loss and joins_micro_batches(trainer):
        raise ValueError(
            "With `max_tokens_per_batch` a batch has all rows of a step, and a `training_step` of yours computes "
            "one loss of it, where TRL has one for each of `gradient_accumulation_steps`. Call "
            "`super().training_step`, which computes them in turn, or leave the budget out."
        )
    return dict(StepBatch((), step))
