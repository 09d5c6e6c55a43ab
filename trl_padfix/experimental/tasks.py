"""The tasks of the experimental trainers, as far as several have the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..trainers.base import PaddingFreeMixin
from ..trainers.checks import require_columns, require_teacher
from ..trainers.distributed import datasets_of
from ..trainers.task import Task


__all__ = ["MessagesTask", "PairTask", "PairTrainer", "PromptTask"]


class _OwnData(Task):
    """Of a trainer that prepares its data within `__init__`, or in its steps; the columns are looked at before."""

    layout_policy = False  # a step joins, generates or shuffles what comes from the data loader

    def check(self, config: Any, given: dict[str, Any]) -> None:
        names = SimpleNamespace(**{name: given.get(name) for name in ("train_dataset", "eval_dataset")})
        for name, dataset in datasets_of(names).items() if given.get("data_collator") is None else ():
            require_columns(dataset, name, self.columns, self.needs)


class PairTask(_OwnData):
    """Pairs, whose halves a step joins."""

    columns = [{"chosen", "rejected"}]
    needs = "Pairs have `chosen` and `rejected` (and `prompt`, unless both begin with it)"


class PairTrainer(PaddingFreeMixin):
    """Stands in front of a trainer of TRL's that takes the metrics of pairs in `get_batch_loss_metrics`."""

    def get_batch_loss_metrics(self, model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.observe_step(model, batch):  # TRL's evaluation does not go through `compute_loss`
            return super().get_batch_loss_metrics(model, batch, *args, **kwargs)


class PromptTask(_OwnData):
    """Prompts, to which a step generates completions."""

    columns = [{"prompt"}]
    needs = "Completions are generated from `prompt`"


class MessagesTask(_OwnData):
    """Conversations, whose last answer a student learns from a teacher, or another one that a step generates."""

    columns = [{"messages"}, {"prompt", "completion"}]
    needs = "A conversation is in `messages`"

    def check(self, config: Any, given: dict[str, Any]) -> None:
        super().check(config, given)
        if not getattr(config, "use_teacher_server", False):
            require_teacher(given)
