"""Errors and warnings before the first step: configurations and losses that `max_tokens_per_batch` cannot split."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import trl
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from ..backward_hooks import module_hook_names
from ..checks import rope_kind_beyond
from ..custom_loss import custom_loss_name
from ..data.columns import column_names
from ..distributed import datasets_of, splitting_parallelism
from .balancing_loss import joins_balancing_losses


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..parts import PaddingFreeTrainer


__all__ = [
    "check_budget",
    "check_configuration",
    "check_loss",
    "custom_collator_notice",
    "has_images",
    "joins_micro_batches",
]

logger = get_logger(__name__)


def check_configuration(config: TrainingArguments, train_dataset: Any) -> None:
    """
    Raises:
        ValueError: If a configuration, or a training dataset, cannot be used with a budget.
    """
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
    is_stream = isinstance(train_dataset, IterableDataset)
    with_images = is_stream and bool(column_names(train_dataset) & {"image", "images"})
    if with_images or not (is_stream or isinstance(train_dataset, Dataset | None)):
        images = " with images, whose tokens are counted before the first step" if with_images else ""
        raise ValueError(
            f"`max_tokens_per_batch` splits steps by the tokens of their rows, and the training dataset is a "
            f"`{type(train_dataset).__name__}`{images}. Give a `datasets.Dataset` (of a stream "
            "`Dataset.from_generator`), or leave the budget out."
        )


def check_budget(longest: np.ndarray, budget: int, first: int | None = None) -> None:
    """
    Check `longest`, the tokens of the longest sequence of each row: of a dataset, or of a stream from row `first` on.

    Raises:
        ValueError: If a sequence has more tokens than the budget.
    """
    if not (longest > budget).any():
        return
    if first is None:
        rows, them = f"{(longest > budget).sum()} rows of the train dataset have a sequence", "them"
        most, row = longest.max(), f"row {longest.argmax()}"
    else:
        rows, them, index = "A row of the train stream has a sequence", "it", int((longest > budget).argmax())
        most, row = longest[index], f"row {first + index}"
    raise ValueError(
        f"{rows} of more tokens than `max_tokens_per_batch={budget}`, the longest {most} ({row}), and no forward "
        f"could hold it. Raise the budget to {most} at least, set `max_length`, or drop {them}."
    )


def check_loss(trainer: PaddingFreeTrainer) -> None:
    """
    Warn of a loss whose forwards are recomputed in backward, and of backward hooks of modules.

    Raises:
        ValueError: If the loss cannot be split.
    """
    if reason := _obstacle(trainer):
        raise ValueError(
            f"{reason}, so the loss of a batch is not the mean of the losses of its micro-batches, and "
            "`max_tokens_per_batch` cannot split it. Leave one of them out."
        )
    recomputed = "All sub-batches of its forward but one are computed again in the backward pass."
    if name := custom_loss_name(trainer):
        logger.warning_once(
            f"`max_tokens_per_batch`: whether the loss of `{name}` compares rows is unknown, so it is computed "
            f"from each whole micro-batch of TRL. {recomputed}"
        )
    if hook := trainer.padding.gradient_hook:
        logger.warning_once(
            f"`max_tokens_per_batch`: `{hook}` acts in the backward pass, on the gradient of a micro-batch, "
            f"so each micro-batch of TRL has one backward. {recomputed}"
        )
    if names := module_hook_names(trainer.model):
        logger.warning_once(
            f"`max_tokens_per_batch` computes a step in several micro-batches, and the backward hooks of modules "
            f"({', '.join(names[:3])}) are called for each of them, with the gradients of its packed tokens."
        )


def _obstacle(trainer: PaddingFreeTrainer) -> str | None:
    """Why the loss of a batch cannot be computed from parts of it, or `None` if it can."""
    task = trainer.padding.task
    if reason := task.token_budget_obstacle():
        return reason
    accumulated = joins_micro_batches(trainer)
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
                "(`gradient_accumulation_steps`), and a token has a different weight in each of them"
            )
        if has_images(trainer) and custom_loss_name(trainer):
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


def joins_micro_batches(trainer: PaddingFreeTrainer) -> bool:
    """Whether a batch of the data loader has the rows of several micro-batches of TRL, as under a budget."""
    return trainer.args.per_device_train_batch_size > getattr(trainer.args, "_rows_per_micro_batch", math.inf)


def custom_collator_notice(with_images: bool, all_rows: bool) -> str:
    """A warning that says which rows a user's collator gets under a budget."""
    if all_rows:
        batches = "all rows of a step, whatever `gradient_accumulation_steps` was"
    elif with_images:
        batches = "each micro-batch of the budget by itself, because images are not numbered by row"
    else:
        batches = "the rows that it gets without a budget, and the batch that it makes is split by rows"
    return f"`max_tokens_per_batch`: the collator is not TRL's and may look at its whole batch. It gets {batches}."


def has_images(trainer: PaddingFreeTrainer) -> bool:
    return any(column_names(dataset) & {"image", "images"} for dataset in datasets_of(trainer).values())
