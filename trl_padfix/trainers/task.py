"""
Tasks: a task describes the rows of a trainer, and how its loss and metrics depend on them.

A user of the package may subclass [`Task`] for [`padding_free_trainer`].
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from transformers import TrainingArguments

from .checks.user_code import why_padded
from .distributed import PaddingFreeTrainer


__all__ = ["OfTrainer", "PairTask", "Task"]


class OfTrainer:
    """An object of a trainer that does not keep it alive: `del trainer` frees its memory at once."""

    def __init__(self, trainer: PaddingFreeTrainer):
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> PaddingFreeTrainer:
        return cast("PaddingFreeTrainer", self._trainer())


class Task(OfTrainer):
    """The default task, for any trainer; a subclass overrides what differs."""

    # Batches

    collators: ClassVar[dict[type, type]] = {}
    """TRL's collators, each with the collator of this package that replaces it and honors `padding_side`."""

    generates_rows: bool | None = None
    """Whether a step has rows that its process has generated; `None`: unknown; treated as `True`."""

    rows_per_item = 1
    """Rows of a batch that belong together: two if pairs come as `[chosen, rejected]`."""

    item = "row"
    """The noun for these rows."""

    sequences: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """The columns of each sequence of a tokenized row, for `group_by_prefix`; see [`dataset_costs`]."""

    # Metrics

    min_max_metrics: ClassVar[dict[str, Callable]] = {}
    """Metrics that are a minimum or maximum over rows instead of a mean, with `torch.min` or `torch.max`."""

    # -- checks

    def knows(self, collator: Any) -> bool:
        """Whether a collator (`None`: TRL's default) is TRL's or ours, so that its padding side can be chosen."""
        return collator is None or type(collator) in {*self.collators, *self.collators.values()}

    def check(self, config: TrainingArguments | None, init_kwargs: dict[str, Any]) -> None:
        """Raise errors that need no loaded model. `init_kwargs`: the arguments of the trainer's `__init__` by name."""

    def on_attached(self) -> None:
        """Raise errors that need both TRL's prepared data and the models with padding removed."""

    # -- batches

    def packs_rows(self) -> bool:
        """Whether TRL packs several sequences into a row."""
        return False

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy in a step on `inputs`; an empty list if it has none."""
        if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), torch.Tensor):
            return []
        return [{name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}]

    def parity_inputs(self, inputs: dict[str, Any], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The batch with the images and token types for one of `padded_batches`, for the parity check."""
        return inputs

    def trimmed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of few rows without columns that are padding in all of them, where `input_ids` has none."""
        return batch

    # -- loss

    def scoring_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module of a model that the loss calls. A token budget splits the forwards of this module."""
        return model

    def model_for_loss(self, model: torch.nn.Module) -> Callable[..., Any]:
        """The model that TRL's loss gets; a subclass may wrap it to drop arguments that it must not receive."""
        return model

    def balances_experts(self) -> bool:
        """Whether TRL adds the load-balancing loss of experts, over all rows of a batch, to the loss."""
        return getattr(self.trainer, "aux_loss_enabled", False)  # distillation and others have no such loss

    def why_padded(self, inputs: Any) -> str | None:
        """Why the forwards of a step run padded ("The forward has ..."); `None` if they may be packed."""
        padding = self.trainer.padding
        if padding.why_padded is not None or not (padding.is_removed and padding.handles[0].enabled):
            return padding.why_padded
        in_parts = padding.budget is not None and padding.budget.budget is not None
        return why_padded(self.trainer, padding.handles[0], inputs, in_parts)

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        """
        Weight of a chunk (some rows of `batch`) in TRL's loss, if loss(batch) = sum(weight_i * loss(chunk_i)).

        `None` if the loss is not such a sum: it then gets the outputs of all rows. `num_items` is the
        `num_items_in_batch` that TRL's loss gets.
        """
        return None

    def around_chunks(self, inputs: dict[str, Any]) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """A block around the losses of the chunks of `inputs`; returns the batch that they are cut from."""
        return contextlib.nullcontext(inputs)

    def rows_are_independent(self) -> bool:
        """Whether the gradient of a step stays the same if rows move to another batch of it or to another process."""
        return False

    # -- metrics

    def metrics_inputs(self, inputs: dict[str, Any], logits: Any, labels: Any) -> tuple[Any, Any]:
        """Logits and labels for `compute_metrics`, made from TRL's logits and labels for a batch."""
        return logits, labels

    def num_loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """Number of items (pairs, tokens) that the loss of a batch is a mean over; `None` if unknown."""
        return None

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Number of items that a metric is a mean over, by its name, where it differs from the loss's number."""
        return {}

    def merge_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """The metrics of a batch, made of their means over its chunks."""
        return means


class PairTask(Task):
    """Rows are the chosen completions of a batch, followed by its rejected ones."""

    rows_per_item = 2
    item = "pair"

    def num_loss_items(self, batch: dict[str, Any]) -> torch.Tensor | None:
        return torch.tensor(len(batch["input_ids"]) // 2, device=batch["input_ids"].device)

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        return len(chunk["input_ids"]) / len(batch["input_ids"])

    def rows_are_independent(self) -> bool:
        return True
