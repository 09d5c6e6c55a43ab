"""
Base class of the parts of a trainer, with the objects that they read: `trainer.padding`, a step, an evaluation.

A part is one feature of a trainer: its attention, its token budget, its token counts. `base.py` has the
ordered tuple of parts, and calls each hook below for one part after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, TrainingArguments

from ...core.anatomy import find_decoder, outermost_pretrained
from ...core.handle import PaddingRemoval, PaddingStats
from ...core.model.patching import Attachment
from ...core.parity.report import ParityReport
from ...core.remove import attachments_on
from ..distributed import PaddingFreeTrainer
from ..settings import Settings
from ..task import OfTrainer, Task


__all__ = ["Evaluation", "Padding", "PaddingFreeTrainer", "Part", "Step", "all_padded", "entered"]


@dataclass
class Step:
    """
    The forwards of one batch, in training or in evaluation.

    Attributes:
        model (`torch.nn.Module`): The model that the loss is computed with, wrapped for training.
        inputs (`dict`): The batch.
        mode (`str`): `"train"` or `"eval"`.
        number (`int`): The optimizer step; in training the first one is 1.
        task ([`Task`]): Describes the rows of the batch.
        arguments (`dict`): The other arguments of `compute_loss` by name.
        why_padded (`str`, *optional*): Why its forwards run padded ("The forward has ...").
        result (`Any`): The value that `compute_loss` returned, once it has.
    """

    model: torch.nn.Module
    inputs: dict[str, Any]
    mode: str
    number: int
    task: Task
    arguments: dict[str, Any] = field(default_factory=dict)
    why_padded: str | None = None
    result: Any = None

    @cached_property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy, if the task names its ids as the model does."""
        return [batch for batch in self.task.padded_batches(self.inputs) if "input_ids" in batch]


@dataclass
class Evaluation:
    """An evaluation loop: the prefix of its metrics, whether it keeps no logits, and its output once it has ended."""

    prefix: str
    loss_only: bool | None
    output: Any = None


class Padding:
    """
    State of padding removal in a trainer: `trainer.padding`.

    Attributes:
        settings ([`Settings`]):
            Our fields of its configuration.
        handle, stats ([`PaddingRemoval`], [`PaddingStats`]):
            Handle of the policy, and its token counts.
        handles (`list[PaddingRemoval]`):
            Handles of the policy, and of the reference or teacher model if there is one; empty without
            `padding_free`.
        parity (`dict[str, list[ParityReport]]`):
            Reports of the parity check, one per model: `"train"` for the first training batch, `"eval"` for the first
            evaluation batch.
        loss_parity (`dict[str, str]`):
            Outcomes of the comparison of the trainer's own loss, with the same keys.
        why_padded (`str`, *optional*):
            Why all later steps run padded, if the parity check of a step found that the loss reads padding.
        why_eval_padded (`str`, *optional*):
            Why evaluations run padded, if their metrics read padding.

    Example:

    ```python
    trainer = DPOTrainer(model, args=DPOConfig("runs/dpo", padding_free=True), train_dataset=pairs)
    trainer.train()
    trainer.padding.stats.pad_fraction  # share of the padded batches that was never computed
    trainer.padding.parity["train"]  # packed against padded, on the first batch
    trainer.padding.restore()
    ```
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.handles: list[PaddingRemoval] = []
        self.counts: list[PaddingStats] = []  # of each handle, also after another trainer has taken over its model
        self.numberings: list[Attachment] = []  # of left-padded rows
        self.parity: dict[str, list[ParityReport]] = {}
        self.loss_parity: dict[str, str] = {}
        self.task: Task  # describes the rows of the trainer, and how its loss depends on them
        # In the order of their hooks. If none of our fields is set, there are none, or only `PaddingSide`.
        self.parts: tuple[Part, ...] = ()
        self.budget: Any = None  # one of them, `TokenBudget`
        self.is_attached = False
        self.is_restored = False
        self.blocks = 0  # open blocks of `in_use`, which nest
        self.is_dry_run = False
        self.models: list[torch.nn.Module] = []
        self.pretrained: list[PreTrainedModel] = []
        self.in_steps: tuple[Part, ...] = ()  # parts whose `around_step` is called
        self.running: Step | None = None
        self.why_padded: str | None = None  # set by the parity check of a step
        self.why_eval_padded: str | None = None  # set by its check of the metrics of an evaluation
        self.undo = contextlib.ExitStack()  # of methods that were replaced on the trainer itself

    def __repr__(self) -> str:
        return f"Padding(handles={self.handles}, stats={self.stats})"

    @property
    def handle(self) -> PaddingRemoval | None:
        """Handle of the policy; `None` before padding is removed."""
        return self.handles[0] if self.handles else None

    @property
    def stats(self) -> PaddingStats:
        """Token counts of all packed forwards of the policy in this trainer; zeros if nothing is packed."""
        return self.counts[0] if self.counts else PaddingStats()

    @property
    def is_removed(self) -> bool:
        """Whether the models pack padded batches."""
        return self.settings.padding_free and bool(self.handles) and not self.handles[0].is_detached

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A block in which the trainer computes. Between such blocks its models compute as if it had not attached."""
        self.blocks += 1
        self.pause_or_resume()
        try:
            yield
        finally:
            self.blocks -= 1
            self.pause_or_resume()

    def pause_or_resume(self) -> None:
        """Resume what is attached, in all threads, within a block of [`Padding.in_use`]; pause it outside of them."""
        for attachment in (*self.handles, *self.numberings):
            if not attachment.is_detached:
                attachment.state = "in use" if self.blocks else "paused"

    def follow(self, models: list[torch.nn.Module]) -> bool:
        """Whether the parts must attach to `models` again: these are new, or another trainer has taken them over."""
        if not self.is_attached or self.is_restored:
            return False
        before = self.pretrained
        if models != self.models:  # FSDP wraps the model when training begins: it is the same transformers model
            self.models = models
            self.pretrained = [pretrained for model in models for pretrained in outermost_pretrained(model)]
        if attached := [*self.handles, *self.numberings]:
            is_taken = any(attachment.state == "taken over" for attachment in attached)
        else:  # another trainer may have attached where we have nothing attached, or attaching failed
            others = (a for p in self.pretrained for a in attachments_on(find_decoder(p)))
            is_taken = self.settings.padding_free or any(a.state != "attached" for a in others)
        return is_taken or self.pretrained != before

    def restore(self) -> None:
        """
        Detach from the models and restore their state before the trainer was created.

        Between trainings and evaluations of the trainer the models compute padded in other code, also without this
        call, and other trainers may take them over. After this call, the trainer itself computes padded, too.
        """
        self.is_restored = True
        self.undo.close()
        for part in self.parts:
            part.restore()


class Part(OfTrainer):
    """
    One feature of a trainer; override the hooks that it needs.

    `trainer.padding` exists when a part is created. The attributes that `transformers` sets exist from `attach` on.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self.settings: Settings = trainer.padding.settings

    def check(self, config: TrainingArguments | None, init_kwargs: dict[str, Any]) -> None:
        """Raise errors that need no loaded model. `init_kwargs`: the arguments of the trainer's `__init__` by name."""

    def around_init(self, config: TrainingArguments | None) -> contextlib.AbstractContextManager[Any]:
        """A block around TRL's `__init__`."""
        return contextlib.nullcontext()

    def attach(self) -> None:
        """Called once, when models and datasets exist, before any forward; possibly within TRL's `__init__`."""

    def attach_to_models(self) -> None:
        """Called after `attach`, and again when the trainer computes with other models, or gets them back."""

    def acts(self) -> bool:
        """Whether the part has anything to do; called once, before `attach`. If not, the part is left out."""
        return True

    def on_init_end(self) -> None:
        """Called at the end of the trainer's `__init__`."""

    def around_dataloader(
        self, dataset: Dataset | IterableDataset, is_training: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """A block around the creation of a data loader."""
        return contextlib.nullcontext()

    def permute(self, loader: Any) -> Any:
        """The data loader for training, perhaps with its rows in another order."""
        return loader

    def around_training_step(self) -> contextlib.AbstractContextManager[Any]:
        """A block around `training_step`."""
        return contextlib.nullcontext()

    def around_ref_logps(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which TRL computes the log-probabilities of the reference model, before the first step."""
        return contextlib.nullcontext()

    def around_step(self, step: Step) -> contextlib.AbstractContextManager[Any]:
        """A block around the forwards of a batch; it may change `step`, whose `result` is set when the block ends."""
        return contextlib.nullcontext()

    def around_label_count(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which Trainer counts the labels of a step, over all processes."""
        return contextlib.nullcontext()

    def around_evaluation_loop(self, evaluation: Evaluation) -> contextlib.AbstractContextManager[Any]:
        """A block around an evaluation loop; `evaluation.output` is set when the block ends."""
        return contextlib.nullcontext()

    def log(self, logs: dict[str, float], mode: str) -> None:
        """Called before TRL adds its metrics to `logs` and logs them."""

    def restore(self) -> None:
        """Put models back into the state before this trainer, also if its `__init__` fails. May be called twice."""


@contextlib.contextmanager
def entered(contexts: Iterable[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """A block within all of `contexts`. Each is created when it is entered, after the one before it was entered."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def all_padded(handles: Iterable[PaddingRemoval], reason: str | None) -> contextlib.AbstractContextManager[None]:
    """A block in which all models run padded for a `reason`, which is told once; without one it does nothing."""
    return entered(handle.padded(reason, is_told=i == 0) for i, handle in enumerate(handles) if reason)
