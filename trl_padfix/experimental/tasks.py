"""TRL's experimental trainers: the table, the tasks, and the steps that differ from other trainers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from transformers import TrainingArguments

from ..trainers.base import PARTS, PaddingFreeMixin, hook
from ..trainers.batching.row_order import RowOrder
from ..trainers.checks.arguments import require_teacher
from ..trainers.data.collators import BatchMixin
from ..trainers.field_types import configuration
from ..trainers.methods.grpo import GRPOTask
from ..trainers.methods.online import OnlineTask, OnlineTrainer
from ..trainers.settings import (
    AttentionConfig,
    ForwardBudgetConfig,
    PackingConfig,
    PaddingConfig,
    ReferenceAttentionConfig,
    TeacherAttentionConfig,
)
from ..trainers.task import Task
from ..versions import TESTED, installed_version


__all__ = ["EXPERIMENTS", "classes_of"]


class ExperimentalTrainer(PaddingFreeMixin):
    """[`PaddingFreeMixin`] for steps that join, generate or shuffle rows: a budget splits the forwards of a batch."""

    part_classes = tuple(part for part in PARTS if part is not RowOrder)  # TRL decides which rows are in a step


class SelfDistillingTrainer(ExperimentalTrainer):
    """[`ExperimentalTrainer`] whose model is its own teacher; TRL also scores the generated rows before the loss."""

    @hook
    def _compute_rollout_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self.padding.budget.split_forwards():
            return super()._compute_rollout_logps(*args, **kwargs)


class JoinedPairTask(Task):
    """Pairs: the step concatenates chosen and rejected rows."""

    generates_rows = False
    rows_per_item = 2
    item = "pair"

    def padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        # ORPO has a field for the token at padding.
        padding = vars(self.trainer).get("padding_value", self.trainer.processing_class.pad_token_id)
        joined = self.trainer.concatenated_inputs(inputs, padding_value=padding)
        return [{name: joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}]


class PromptTask(Task):
    """Prompts: the step generates completions."""

    generates_rows = True


class A2POTask(PromptTask):
    """[`PromptTask`]; TRL pads its prompts on the tokenizer's side."""

    def on_attached(self) -> None:
        if self.trainer.processing_class.padding_side != "left":
            raise ValueError(
                "A2PO pads prompts on the tokenizer's side, and this one pads right: completions would follow "
                "padding. Set its `padding_side='left'`."
            )


class SelfDistillingTask(PromptTask):
    """[`PromptTask`] whose model also scores the completions after the prompts of its teacher."""

    padded_batches = OnlineTask.padded_batches


class MessagesTask(Task):
    """Conversations: a student learns from a teacher, on the last answer or on one that the step generates."""

    generates_rows = True

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        if not vars(config).get("use_teacher_server"):
            require_teacher(init_kwargs)


class GMPOTask(GRPOTask):
    """The loss is a mean over sequences, for any `loss_type`."""

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        uses_entropy = self.trainer.top_entropy_quantile < 1
        return None if uses_entropy else OnlineTask.chunk_weight(self, chunk, batch, num_items)


class TripleTask(Task):
    """Batches of `N` examples have `3 * N` rows: chosen completions, then rejected ones, then reference answers."""

    generates_rows = False
    rows_per_item = 3
    item = "example"


# -- steps


class PairTrainer(ExperimentalTrainer):
    """A mixin for a trainer of TRL that computes loss and metrics in `get_batch_loss_metrics`."""

    @hook
    def get_batch_loss_metrics(self, model: torch.nn.Module, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self.observe_step(model, batch):  # TRL's evaluation does not go through `compute_loss`
            return super().get_batch_loss_metrics(model, batch, *args, **kwargs)


class A2POTrainer(ExperimentalTrainer):
    """[`ExperimentalTrainer`] whose log-probabilities are computed before the loss."""

    @hook
    def _get_sequence_logps(self, *args: Any, **kwargs: Any) -> Any:
        with self.padding.budget.split_forwards():
            return super()._get_sequence_logps(*args, **kwargs)


class OnlineDPOTrainer(ExperimentalTrainer):
    """[`ExperimentalTrainer`] whose loss is in `training_step`."""

    @hook
    def _forward(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if model is self.ref_model:
            with self.padding.budget.split_forwards():
                return super()._forward(model, *args, **kwargs)
        with self.observe_step(model, {}):  # TRL computes the loss of the policy's forwards within `training_step`
            return super()._forward(model, *args, **kwargs)


# -- the table


class Experiment(NamedTuple):
    """The parts of one of TRL's experiments: `nameConfig` and `nameTrainer` in the module of its key."""

    name: str
    trainer: type
    task: type[Task]
    config: tuple[type, ...]
    collator: type | None = None


FORWARDS = (ForwardBudgetConfig, PackingConfig)
EXPERIMENTS = {
    "a2po": Experiment("A2PO", A2POTrainer, A2POTask, (ReferenceAttentionConfig, *FORWARDS)),
    "cpo": Experiment("CPO", PairTrainer, JoinedPairTask, (AttentionConfig, *FORWARDS)),
    "gkd": Experiment("GKD", ExperimentalTrainer, MessagesTask, (TeacherAttentionConfig, *FORWARDS)),
    "gmpo": Experiment("GMPO", OnlineTrainer, GMPOTask, (ReferenceAttentionConfig, *FORWARDS)),
    "gold": Experiment("GOLD", ExperimentalTrainer, MessagesTask, (TeacherAttentionConfig, *FORWARDS)),
    "iw_opd": Experiment("IWOPD", ExperimentalTrainer, MessagesTask, (TeacherAttentionConfig, *FORWARDS)),
    "online_dpo": Experiment("OnlineDPO", OnlineDPOTrainer, PromptTask, (ReferenceAttentionConfig, *FORWARDS)),
    "orpo": Experiment("ORPO", PairTrainer, JoinedPairTask, (AttentionConfig, *FORWARDS)),
    "sdft": Experiment("SDFT", SelfDistillingTrainer, SelfDistillingTask, (AttentionConfig, *FORWARDS)),
    "sdpo": Experiment("SDPO", SelfDistillingTrainer, SelfDistillingTask, (AttentionConfig, *FORWARDS)),
    "tpo": Experiment(
        "TPO", ExperimentalTrainer, TripleTask, (AttentionConfig, ForwardBudgetConfig, PaddingConfig), BatchMixin
    ),
}
"""By the name of TRL's module."""


def classes_of(module: str) -> dict[str, type]:
    """
    Our classes for `trl.experimental.MODULE`, by TRL's names.

    Raises:
        ImportError: If the installed TRL no longer has such a module.
    """
    name, trainer, task, config, collator = EXPERIMENTS[module]
    try:
        trls = vars(import_module(f"trl.experimental.{module}.{module}_trainer"))
    except ImportError as error:
        if error.name is None or not error.name.startswith(f"trl.experimental.{module}"):
            raise  # TRL has the module, but one of its imports failed
        tested = TESTED[-1].trl
        raise ImportError(
            f"TRL {installed_version('trl')} has no `trl.experimental.{module}` (anymore), so `trl_padfix."
            f"experimental.{module}` is gone with it; TRL {tested} had it. Run: pip install 'trl=={tested}', or use "
            "another trainer."
        ) from error

    def derive(bases: tuple[type, ...], theirs: str, **members: Any) -> type:
        doc = f"TRL's [`~trl.experimental.{module}.{theirs}`] without padding."
        # Pickled by module and name, as the arguments in checkpoints are.
        members |= {"__module__": f"{__package__}.{module}", "__doc__": doc}
        return type(theirs, (*bases, trls[theirs]), members)

    classes = {f"{name}Config": configuration(dataclass(derive(config, f"{name}Config")))}
    if collator is not None:
        theirs = "DataCollatorForTriplePreference"
        classes[theirs] = dataclass(derive((collator,), theirs))
        task = type(task.__name__, (task,), {"collators": {trls[theirs]: classes[theirs]}})
    return classes | {f"{name}Trainer": derive((trainer,), f"{name}Trainer", task_class=task)}
