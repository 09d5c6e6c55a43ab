"""Tasks that several experimental trainers share."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..trainers.base import PARTS, PaddingFreeMixin
from ..trainers.batching.row_order import RowOrder
from ..trainers.batching.token_budget import TokenBudget
from ..trainers.checks import require_columns, require_teacher
from ..trainers.context_parallel import ContextParallel
from ..trainers.distributed import datasets_of
from ..trainers.task import Task


if TYPE_CHECKING:
    import torch
    from transformers import TrainingArguments


__all__ = [
    "ExperimentalTrainer",
    "GeneratingTrainer",
    "JoinedPairTask",
    "MessagesTask",
    "PairTrainer",
    "PromptTask",
    "SelfDistillingTrainer",
]


class ExperimentalTrainer(PaddingFreeMixin):
    """[`PaddingFreeMixin`] for steps that join, generate or shuffle rows: a budget splits the forwards of a batch."""

    part_classes = tuple(part for part in PARTS if part is not RowOrder)  # TRL decides which rows are in a step

    def split_forwards(self) -> contextlib.AbstractContextManager[None]:
        """A block with forwards outside of `observe_step`, which the budget splits, too."""
        return self.padding.part(TokenBudget).split_forwards()


class GeneratingTrainer(ExperimentalTrainer):
    """
    [`ExperimentalTrainer`] that generates in its steps.

    With context parallelism all processes of a group get the same completions.
    """

    def _prepare_inputs(self, inputs: list[dict[str, Any]] | dict[str, Any]) -> Any:
        with self.padding.part(ContextParallel).generating(inputs):
            return super()._prepare_inputs(inputs)


class SelfDistillingTrainer(GeneratingTrainer):
    """[`GeneratingTrainer`] whose model is its own teacher; TRL also scores the generated rows before the loss."""

    def _compute_rollout_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self.split_forwards():
            return super()._compute_rollout_logps(*args, **kwargs)


class _SelfPreparedTask(Task):
    """Task of a trainer of TRL that prepares its data in `__init__` or in its steps: columns are checked before."""

    supports_cp_generation = generates_within_step = True

    layout_policy = False  # a step joins, generates or shuffles the rows of the data loader

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        if init_kwargs.get("data_collator") is not None:
            return  # a collator of a user's may take any columns
        datasets = SimpleNamespace(**{name: init_kwargs.get(name) for name in ("train_dataset", "eval_dataset")})
        for name, dataset in datasets_of(datasets).items():
            require_columns(dataset, name, self.columns, self.needs)


class JoinedPairTask(_SelfPreparedTask):
    """Pairs: the step concatenates chosen and rejected rows."""

    columns = [{"chosen", "rejected"}]
    needs = "Pairs have `chosen` and `rejected` (and `prompt`, unless both begin with it)"
    generates_rows = supports_cp_generation = generates_within_step = False


class PairTrainer(ExperimentalTrainer):
    """A mixin for a trainer of TRL that computes loss and metrics in `get_batch_loss_metrics`."""

    def get_batch_loss_metrics(self, model: torch.nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.observe_step(model, batch):  # TRL's evaluation does not go through `compute_loss`
            return super().get_batch_loss_metrics(model, batch, *args, **kwargs)


class PromptTask(_SelfPreparedTask):
    """Prompts: the step generates completions."""

    columns = [{"prompt"}]
    needs = "Completions are generated from `prompt`"


class MessagesTask(_SelfPreparedTask):
    """Conversations: a student learns from a teacher, on the last answer or on one that the step generates."""

    columns = [{"messages"}, {"prompt", "completion"}]
    needs = "A conversation is in `messages`"

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        super().check(config, init_kwargs)
        if not getattr(config, "use_teacher_server", False):
            require_teacher(init_kwargs)
