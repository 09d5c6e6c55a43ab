"""
Base class of the parts of a trainer, with the objects that their hooks receive.

A part is one feature of a trainer: its attention, its token budget, its token counts. `base.py` has the
ordered tuple of parts, and calls each hook below for one part after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import Trainer, TrainingArguments

    from ..settings import Settings
    from .packing import Padding

    class PaddingFreeTrainer(Trainer):
        """A trainer as parts and tasks use it: TRL's class with [`PaddingFreeMixin`], or a test's stand-in."""

        padding: Padding
        accelerator: Any  # many attributes are optional, and set whenever the parallelism is on that needs them


__all__ = ["Evaluation", "Part", "Step", "entered"]


@dataclass
class Step:
    """
    The forwards of one batch, in training or in evaluation.

    Attributes:
        model (`torch.nn.Module`): The model that the loss is computed with, wrapped for training.
        inputs (`dict`): The batch.
        mode (`str`): `"train"` or `"eval"`.
        number (`int`): The optimizer step; in training the first one is 1.
        padded_batches (`Callable`): `Task.padded_batches`.
        returns_outputs (`bool`): Whether `compute_loss` returns `(loss, outputs)`.
        has_rows (`bool`): Whether any row of the batch counts; if none does, all repeat those of other processes.
        result (`Any`): The value that `compute_loss` returned, once it has; the only field that is set later.
    """

    model: torch.nn.Module
    inputs: dict[str, Any]
    mode: str
    number: int
    padded_batches: Callable[[dict[str, Any]], list[dict[str, torch.Tensor]]]
    returns_outputs: bool = False
    has_rows: bool = True
    result: Any = None

    @cached_property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy."""
        return self.padded_batches(self.inputs)


@dataclass
class Evaluation:
    """An evaluation loop: the prefix of its metrics, whether it keeps no logits, and its output once it has ended."""

    prefix: str
    loss_only: bool | None
    output: Any = None


class Part:
    """
    One feature of a trainer; override the hooks that it needs.

    `trainer.padding` exists when a part is created. The attributes that `transformers` sets exist from `attach` on.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        self.trainer = trainer
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

    def on_init_end(self) -> None:
        """Called at the end of the trainer's `__init__`."""

    def around_dataloader(
        self, dataset: Dataset | IterableDataset, is_training: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """A block around the creation of a data loader."""
        return contextlib.nullcontext()

    def around_ref_logps(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which TRL computes the log-probabilities of the reference model, before the first step."""
        return contextlib.nullcontext()

    def acts_in_steps(self) -> bool:
        """Whether the four hooks below are called in steps; asked after `attach_to_models`."""
        return type(self).around_step is not Part.around_step

    def begin_step(self, step: Step) -> Step:
        """The step, perhaps on another batch: called for one part after the other, before all `around_step`."""
        return step

    def around_step(self, step: Step) -> contextlib.AbstractContextManager[Any]:
        """A block around the forwards of a batch; `step.result` is set when the block ends."""
        return contextlib.nullcontext()

    def check_batch(self, batch: dict[str, Any]) -> None:
        """Check the batch of a step, and one that a subclass has edited within it."""

    def around_user_step(self, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A block around a user's `training_step`."""
        return contextlib.nullcontext()

    def before_generation(self, mode: str) -> None:
        """Called before a step of a trainer that generates its rows gets them."""

    def around_label_count(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which Trainer counts the labels of a step, over all processes."""
        return contextlib.nullcontext()

    def around_evaluate(self) -> contextlib.AbstractContextManager[Any]:
        """A block around `evaluate`."""
        return contextlib.nullcontext()

    def around_evaluation_loop(self, evaluation: Evaluation) -> contextlib.AbstractContextManager[Any]:
        """A block around an evaluation loop; `evaluation.output` is set when the block ends."""
        return contextlib.nullcontext()

    def log(self, logs: dict[str, float], mode: str) -> None:
        """Called before TRL adds its metrics to `logs` and logs them."""

    def restore(self) -> None:
        """Put models and callbacks back into the state before this trainer. May be called twice."""

    def on_init_error(self) -> None:
        """Called if the trainer's `__init__` fails; by default `restore`."""
        self.restore()


@contextlib.contextmanager
def entered(contexts: Iterable[contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """A block within all of `contexts`. Each is created when it is entered, after the one before it was entered."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
