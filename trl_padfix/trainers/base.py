"""
The mixin that removes padding from a trainer.

Losses, metrics and the loop are TRL's. The mixin overrides TRL's hooks, each once, and calls the parts in their order
([`PARTS`]); what a part does stands in its own file. What differs between trainers is their [`Task`].

A new trainer is one file with a task and a class, and one line in `_MODULES` of `trl_padfix/__init__.py`:

    class XTask(Task):
        columns = [{"prompt", "completion"}]            # what a dataset must have
        collators = {trl_x.DataCollatorForX: OurCollator}  # if the padding side is to be honoured

        def padded_batches(self, inputs): ...           # if a batch names ids and mask differently


    class XTrainer(PaddingFreeMixin, trl.XTrainer):
        task_class = XTask

`task.py` has all that a task may say, with its defaults. Forwards that TRL computes outside of `compute_loss` run
within `observe_step`, so that they are checked and counted, too. A trainer whose tokens come about in another way
(`online.py`: they are generated) is a subclass of the mixin with parts of its own. [`padding_free_trainer`] makes a
trainer of any class without a file.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from datasets import Dataset
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from ..core.call.batch_metadata import with_known_batch
from .attention_choice import AttentionChoice
from .batching.micro_batches import MICRO_BATCHES, pieces_of
from .batching.sampler import StepDataset, StepOrder
from .batching.token_budget import Budget, Splitting
from .checkpoints.model_cards import card_tags, describe_in_card
from .checkpoints.whole_checkpoints import WholeCheckpoints
from .checks import check_arguments
from .context_parallel import ContextParallel
from .custom_loss import observed
from .data.batch_metadata import pop_metadata
from .data.precomputed_layouts import PrecomputedLayouts
from .field_types import temporarily_set
from .generation.evaluation import Generation
from .metrics.exact_eval_means import ExactMeans
from .metrics.finite_values import FiniteValues
from .metrics.token_counts import TokenCounts
from .packing import Packing, Padding
from .parity import Parity
from .parts import Evaluation, Part, Settings, Step, entered
from .task import Task


VAR_POSITIONAL, VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD

__all__ = ["PARTS", "PaddingFreeMixin", "padding_free_trainer"]

PARTS: tuple[type[Part], ...] = (
    AttentionChoice,  # models are switched before anything is attached to them
    Packing,
    ContextParallel,  # of what is packed
    ExactMeans,  # takes rows out of a batch, so before all that look at it
    Parity,  # not counted, and with layouts of its own
    PrecomputedLayouts,
    StepOrder,
    Budget,  # around the collator that adds layouts
    Generation,  # after the counted part of an evaluation
    TokenCounts,
    FiniteValues,
    WholeCheckpoints,
)
"""The parts of a trainer, in the order in which they are called; blocks end in reverse."""


class PaddingFreeMixin:
    """
    Padding removal for a trainer; stands in front of TRL's class.

    A configuration of this package switches it with its fields; a plain one of TRL's is taken as it is, its
    `padding_free` honoured.

    Attributes:
        padding ([`Padding`]):
            What removes the padding: handles, token counts, layouts, the reports of the parity check, settings.
    """

    task_class: ClassVar[type[Task]] = Task
    """What the rows of the trainer are, and what its loss makes of them."""

    part_classes: ClassVar[tuple[type[Part], ...]] = PARTS

    fixed_settings: ClassVar[dict[str, Any]] = {}
    """Settings that hold whatever the configuration says."""

    padding: Padding

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `inspect.signature`, `help` and notebooks show the parameters of TRL's class; so does pyright, which does not
        # see the `__init__` of the mixin.
        package = __name__.partition(".")[0]
        owner = next(c for c in cls.__mro__ if "__init__" in vars(c) and c.__module__.partition(".")[0] != package)
        if (compute_loss := observed(cls.compute_loss)) is not cls.compute_loss:  # which need not call ours
            cls.compute_loss = compute_loss
        if owner is not object:
            signature = inspect.signature(owner.__init__)
            cls.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    if not TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            classes = type(self).__mro__
            others = classes[classes.index(PaddingFreeMixin) + 1 :]
            given = _by_name([c for c in others if "__init__" in vars(c)], args, kwargs)
            config = given.get("args")
            self.padding = padding = Padding(Settings.of(config, **self.fixed_settings))
            padding.task = self.task_class(self)
            check_arguments(config, padding.settings, padding.task, given)
            padding.parts = tuple(part(self) for part in self.part_classes)
            try:
                for part in padding.parts:
                    part.check(config, given)
                padding.task.check(config, given)
                with entered(part.constructing(config) for part in padding.parts):
                    super().__init__(*args, **kwargs)
                self.padding_free = padding.settings.padding_free
                self._attach()
                for part in padding.parts:
                    part.ready()
            except BaseException:
                for part in reversed(padding.parts):
                    part.abandon()
                raise

    def _attach(self) -> None:
        """Attach to the models, once: at the end of `__init__`, or where TRL computes with them before."""
        if not self.padding.is_attached:
            self.padding.is_attached = True
            for part in self.padding.parts:
                part.attach()
            self.padding.task.attached()

    def restore_padding(self) -> None:
        """
        Detach from the models and from the callbacks: they are as they were before this trainer was made.

        After training they stay attached, until this is called or another trainer of this package takes them over.
        """
        self.padding.restore()

    # -- data

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(super()._prepare_dataset).bind(*args, **kwargs)
        task, given = self.padding.task, SimpleNamespace(**call.arguments)
        dataset = next(iter(call.arguments))
        call.arguments[dataset] = checked = task.check_dataset(call.arguments[dataset], given)
        prepared = super()._prepare_dataset(*call.args, **call.kwargs)
        if isinstance(prepared, Dataset):
            task.check_prepared(prepared, len(checked), given)
        return prepared

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL computes these inside its `__init__`, before ours has attached.
        self._attach()
        with entered(part.precomputing() for part in self.padding.parts):
            return super()._precompute_ref_logps(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        with self._loading(self.train_dataset, is_training=True):
            return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        with self._loading(self.eval_dataset[found] if isinstance(found, str) else found):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        with self._loading(test_dataset):
            return super().get_test_dataloader(test_dataset)

    def _loading(self, dataset: Any, is_training: bool = False) -> contextlib.AbstractContextManager[None]:
        return entered(part.loading(dataset, is_training) for part in self.padding.parts)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        order = next((part for part in self.padding.parts if isinstance(part, StepOrder)), None)
        if order is None or not order.is_on:
            return super()._get_train_sampler(*args, **kwargs)
        dataset = next((given for given in (*args, *kwargs.values()) if given is not None), self.train_dataset)
        dataset = dataset.rows if isinstance(dataset, StepDataset) else dataset
        return order.sampler(super()._get_train_sampler(dataset), dataset)

    # -- steps

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        train, scored = super().training_step, self.padding.task.scored  # before the `compute_loss` of a subclass
        if (pieces := pieces_of(inputs))[0] is inputs:
            return train(model, scored(inputs), *args, **kwargs)
        inputs = {**inputs, MICRO_BATCHES: [scored(piece) for piece in pieces]}
        return self.padding.part(Budget).training_step(train, model, inputs, *args, **kwargs)

    @observed
    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given, splitting = self.padding.task.model_for_loss(model), self.padding.part(Splitting)
        return splitting.compute_loss(super().compute_loss, given, inputs, *args, **kwargs)

    @contextlib.contextmanager
    def observe_step(self, model: Any, inputs: dict[str, Any], returns_outputs: bool = False) -> Iterator[Step]:
        """
        A block with forwards of the policy, and of the reference, on one batch: packed as its layouts say, checked for
        parity on the first batch, and counted. Within another such block it only takes the batch as it is now.
        """
        padding, running = self.padding, self.padding.running
        if pieces_of(inputs)[0] is not inputs:
            raise ValueError(
                "With `max_tokens_per_batch` a batch is the micro-batches of a step, and a `training_step` of yours "
                "took it for one. Call `super().training_step`, which runs them in turn, or leave the budget out."
            )
        mode = "train" if self.model.training else "eval"
        number = self.state.global_step + (mode == "train")
        plain, batch_metadata = pop_metadata(padding.task.scored(inputs))
        if running is not None:  # whose batch may have been edited since
            batch_metadata = running.batch_metadata
            padding.part(ContextParallel).check_batch(plain)
        known = batch_metadata.known(plain if running is None else inputs) if batch_metadata is not None else []
        step = Step(model, plain, mode, number, padding.task.padded_batches, batch_metadata, known, returns_outputs)
        blocks = (part.step(step) for part in padding.parts) if running is None else map(with_known_batch, known)
        with temporarily_set(padding, "running", step), entered(blocks):
            yield step

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with temporarily_set(self.padding, "predicted", inputs):
            scored = self.padding.task.scored(inputs)
            loss, logits, labels = super().prediction_step(model, scored, *args, **kwargs)
        return loss, *self.padding.task.for_metrics(inputs, logits, labels)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        self.padding.part(FiniteValues).see_gradient(norm, self.state.global_step + 1)
        return norm

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        if (predicted := self.padding.predicted) is not None:
            batch_samples = [predicted]  # as TRL counts it: with the labels of first tokens
        batches = [piece for batch in batch_samples for piece in pieces_of(batch)]
        return super()._get_num_items_in_batch(self.padding.task.counted(batches), device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        return sum(map(super().floating_point_ops, pieces_of(inputs)))

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for piece in pieces_of(inputs):
            super()._track_num_input_tokens(piece)

    # -- evaluation and log

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with entered(part.evaluating() for part in self.padding.parts):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        evaluation = Evaluation(metric_key_prefix, prediction_loss_only)
        with entered(part.evaluation(evaluation) for part in self.padding.parts):
            evaluation.output = super().evaluation_loop(
                dataloader, description, evaluation.loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
        return evaluation.output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for part in self.padding.parts:
            part.log(logs, "train" if self.model.training else "eval")
        super().log(logs, *args, **kwargs)

    # -- checkpoints and the model card

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        with self.padding.part(WholeCheckpoints).training(resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        self.padding.part(PrecomputedLayouts).run_deferred_checks()  # of weights that may be wrong nothing is kept
        with self.padding.part(WholeCheckpoints).saving(Path(self._get_output_dir(trial))):
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return self.padding.part(WholeCheckpoints).output_dir(super()._get_output_dir(trial))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.padding.part(WholeCheckpoints).postpones_push():
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(super().create_model_card).bind(*args, **kwargs)
        tags, handle = call.arguments.get("tags") or [], self.padding.handle
        call.arguments["tags"] = [*([tags] if isinstance(tags, str) else tags), *card_tags(handle)]
        super().create_model_card(*call.args, **call.kwargs)
        if self.is_world_process_zero():
            describe_in_card(Path(self.args.output_dir) / "README.md", handle)


def _by_name(owners: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the first of `owners` by name, also those that it passes on to the next ones."""
    signature = inspect.signature(owners[0].__init__)
    try:
        named = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError as error:  # as Python words it for a call
        raise TypeError(f"{owners[0].__name__}.__init__() {error}") from None
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    args, kwargs = named.pop(kinds.get(VAR_POSITIONAL), ()), named.pop(kinds.get(VAR_KEYWORD), {})
    try:
        return named | (_by_name(owners[1:], args, kwargs) if args or kwargs else {})
    except TypeError:  # arguments that the next class needs beside these
        return named | kwargs


T = TypeVar("T", bound=Trainer)

ANY_TRAINERS = (
    "padding_free", "prefix_sharing", "parity_check", "stop_on_nonfinite", "pool_last_token", "attn_implementation"
)  # fmt: skip
"""Settings for which nothing need be known of the rows of a trainer."""


def padding_free_trainer(trainer_class: type[T], *, task_class: type[Task] = Task, **settings: Any) -> type[T]:
    """
    A trainer class like another one, without padding.

    Its forwards are packed, compared with the padded ones on the first batch of training and of evaluation, and
    counted; the loss, the loop and the data are those of `trainer_class`. It also has what our trainers have:
    `trainer.padding`, `perf/tokens_per_second` and `padfix/pad_fraction` in the log, checkpoints that are whole.

    Args:
        trainer_class (`type`):
            [`~transformers.Trainer`], one of TRL's trainers, or a class of your own.
        task_class (`type`, *optional*, defaults to [`Task`]):
            What its batches are. The default one reads `input_ids` and `attention_mask`; of batches with other names
            what the model is called with is checked and counted.
        **settings:
            `prefix_sharing`, `parity_check`, `stop_on_nonfinite`, `pool_last_token`, `attn_implementation` and
            `padding_free` (here `True` by default), as in [`DPOConfig`]. They hold whatever the configuration says;
            those that are not given are read from the configuration, where it has them.

    Returns:
        `type`: a subclass of `trainer_class`, with its signature.

    Raises:
        TypeError: For another setting.

    Example:

    ```python
    >>> from transformers import Trainer
    >>> from trl_padfix import padding_free_trainer

    >>> PaddingFreeTrainer = padding_free_trainer(Trainer, prefix_sharing=True)
    >>> PaddingFreeTrainer.__name__, issubclass(PaddingFreeTrainer, Trainer)
    ('PaddingFreeTrainer', True)

    ```
    """
    if unknown := sorted(settings.keys() - set(ANY_TRAINERS)):
        raise TypeError(
            f"`padding_free_trainer` has no settings {unknown}; it has {list(ANY_TRAINERS)}. What concerns the rows "
            "of a trainer needs a trainer of this package."
        )
    if issubclass(trainer_class, PaddingFreeMixin):
        raise TypeError(f"{trainer_class.__name__} removes padding already: set `padding_free` in its configuration.")
    own = {
        "__doc__": f"[`{trainer_class.__name__}`] without padding, made by [`padding_free_trainer`].",
        "__module__": trainer_class.__module__,
        "task_class": task_class,
        "fixed_settings": {"padding_free": True, **settings},
    }
    return type(f"PaddingFree{trainer_class.__name__}", (PaddingFreeMixin, trainer_class), own)  # type: ignore[return-value]
