"""
The mixin that removes padding from a trainer.

Losses, metrics and the loop are TRL's. The mixin overrides each hook of TRL once, and calls the parts in the order of
[`PARTS`]; each part has a file of its own. Trainers differ in their [`Task`].

A new trainer is one file with a task and a class, a configuration, and the lines that CONTRIBUTING.md lists:

    class XTask(Task):
        collators = {trl_x.DataCollatorForX: OurCollator}  # if `padding_side` should work

        def padded_batches(self, inputs): ...              # if a batch has other names for ids and mask


    class XTrainer(PaddingFreeMixin, trl.XTrainer):
        task_class = XTask

`task.py` has all members of a task, with their defaults. If TRL computes forwards outside of `compute_loss`, run them
within `observe_step`, which checks and counts them. A trainer that generates its tokens is a subclass of the mixin
with other parts (`online.py`). [`padding_free_trainer`] makes a trainer of any class without a file.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from ..core.anatomy import outermost_pretrained
from ..core.call.batch_cache import batch_cache
from ..core.context import temporarily_set, within
from ..core.model.inspection import package_of
from ..core.remove import take_over
from ..core.switch import OFF, is_off
from .batching.row_order import RowOrder
from .batching.token_budget import TokenBudget
from .checks.arguments import check_arguments
from .checks.user_code import INPUT_METHODS, custom_method, observe_loss, observe_user_loss, observe_user_step
from .distributed import PaddingRemover, models_of
from .metrics.token_counts import TokenCounts
from .parts.attention_choice import AttentionChoice
from .parts.context_parallel import ContextParallel
from .parts.generation import Generation
from .parts.packing import RemovePadding
from .parts.padding_side import PaddingSide
from .parts.parity import OWN_LOOP, OWN_STEP, Parity
from .parts.part import Evaluation, Padding, Part, Step, all_padded, entered
from .resume import checkpoint_to_resume
from .settings import COMPUTED, PackingConfig, Settings, trls_configuration, values_off
from .task import Task


logger = get_logger(__name__)

__all__ = ["PARTS", "PaddingFreeMixin", "arguments_by_name", "hook"]

PARTS: tuple[type[Part], ...] = (
    PaddingSide,  # the only part if none of our fields is set and the tokenizer pads left
    AttentionChoice,  # switches models, before anything is attached to them
    RemovePadding,
    ContextParallel,  # reads the handles of `RemovePadding`
    Parity,  # comes before `TokenCounts`, which does not count its forwards
    RowOrder,
    TokenBudget,
    Generation,  # generates after `TokenCounts` has counted the forwards of an evaluation
    TokenCounts,
)
"""The parts of a trainer, in the order of their hooks; blocks end in reverse order."""


class hook:  # noqa: N801
    """
    A decorator of a method that TRL's class has, too: TRL's runs alone where none of our fields is set.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from trl_padfix.trainers.base import hook

    >>> class Theirs:
    ...     def step(self):
    ...         return "theirs"
    >>> class Ours(Theirs):
    ...     padding = SimpleNamespace(parts=())
    ...
    ...     @hook
    ...     def step(self):
    ...         return "ours, around " + super().step()
    >>> trainer = Ours()
    >>> before, trainer.padding.parts = trainer.step(), ("a part",)
    >>> before, trainer.step()
    ('theirs', 'ours, around theirs')

    ```
    """

    def __init__(self, method: Callable[..., Any]):
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:  # a function would not get the class for `super`
        @wraps(self.method)
        def passing(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.padding.parts:
                return self.method(trainer, *args, **kwargs)
            return getattr(super(owner, trainer), name)(*args, **kwargs)

        setattr(owner, name, passing)


class PaddingFreeMixin:
    """
    Padding removal for a trainer: a mixin in front of TRL's class.

    The fields of this package's configurations turn it on. A plain configuration of TRL works, too: its `padding_free`
    turns on ours.

    Attributes:
        padding ([`Padding`]):
            Handles, token counts, parity reports and settings.
    """

    task_class: ClassVar[type[Task]] = Task
    """Describes the rows of the trainer, and how its loss depends on them."""

    part_classes: ClassVar[tuple[type[Part], ...]] = PARTS
    """The classes of its parts, in the order of their hooks."""

    fixed_settings: ClassVar[dict[str, Any]] = {}
    """Settings that override the configuration."""

    padding: Padding

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A `compute_loss` of a subclass need not call the mixin's, so it is wrapped, too.
        if (compute_loss := observe_loss(cls.compute_loss)) is not cls.compute_loss:
            cls.compute_loss = compute_loss
        _show_parameters(cls)

    if not TYPE_CHECKING:  # to a type checker, signatures are TRL's

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            init_kwargs = arguments_by_name(self._init_owners(), args, kwargs)
            config = init_kwargs.get("args")
            self.padding = padding = Padding(Settings.of(config, **self.fixed_settings))
            padding.task = self.task_class(self)
            if is_off():
                off = ", ".join(f"`{name}`" for name in COMPUTED)
                logger.warning(
                    f"{OFF} is set: {off} are off. Steps run padded, as in TRL, and need TRL's time and memory."
                )
            if padding.settings.changed:
                if isinstance(config, PackingConfig):
                    config.is_read = True
                check_arguments(config, padding.settings, padding.task, init_kwargs)
            elif config is not None and not (isinstance(config, PackingConfig) or self.fixed_settings):
                logger.warning(
                    f"`args` is a `{type(config).__module__.partition('.')[0]}.{type(config).__name__}`, so "
                    "TRL's code computes every step. To remove padding, import the configuration from trl_padfix, "
                    "too, and set `padding_free=True`."
                )
            parts = (part for part in self.part_classes if padding.settings.changed or part is PaddingSide)
            padding.parts = tuple(part(self) for part in parts)
            padding.budget = next((part for part in padding.parts if isinstance(part, TokenBudget)), None)
            try:
                for part in padding.parts:
                    part.check(config, init_kwargs)
                if padding.settings.changed:
                    padding.task.check(config, init_kwargs)
                around = (part.around_init(config) for part in padding.parts)
                with temporarily_set(config, **values_off(config)), entered(around):
                    super().__init__(*args, **kwargs)
                if padding.settings.changed:
                    self.padding_free = padding.settings.padding_free
                with padding.in_use():
                    self._attach()
                    for part in padding.parts:
                        part.on_init_end()
            except BaseException:  # also `KeyboardInterrupt`: the user's model must not keep half of the patches
                for part in reversed(padding.parts):
                    part.restore()
                raise

    def _init_owners(self) -> list[type]:
        """The classes behind the mixin that define an `__init__`, in the order of their calls."""
        classes = type(self).__mro__
        return [c for c in classes[classes.index(PaddingFreeMixin) + 1 :] if "__init__" in vars(c)]

    def _attach(self) -> None:
        """Attach to the models, once: at the end of `__init__`, or earlier if TRL computes with them there."""
        if not self.padding.is_attached:
            self.padding.is_attached = True
            self.padding.parts = tuple(part for part in self.padding.parts if part.acts())
            if self.padding.parts:
                self.padding.follow(models_of(self))
            for part in self.padding.parts:
                part.attach()
            self._attach_to_models()
            if self.padding.settings.changed:
                self.padding.task.on_attached()

    def _attach_to_models(self) -> None:
        take_over(models_of(self))
        for part in self.padding.parts:
            part.attach_to_models()
        self.padding.pause_or_resume()
        self.padding.in_steps = self.padding.parts

    def _follow_models(self) -> None:
        """Attach again if `model_init` has made another model, or if another trainer has taken the models."""
        if not self.padding.parts:
            take_over(models_of(self))
        elif self.padding.follow(models_of(self)):
            self._attach_to_models()

    # -- data

    @hook
    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL calls this inside its `__init__`, before our `__init__` attaches.
        self._attach()
        with self.padding.in_use(), entered(part.around_ref_logps() for part in self.padding.parts):
            return super()._precompute_ref_logps(*args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        with self._loading(self.train_dataset, is_training=True):
            loader = super().get_train_dataloader()
        for part in self.padding.parts:
            loader = part.permute(loader)
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        with self._loading(self.eval_dataset[dataset] if isinstance(dataset, str) else dataset):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        with self._loading(test_dataset):
            return super().get_test_dataloader(test_dataset)

    @contextlib.contextmanager
    def _loading(self, dataset: Dataset | IterableDataset, is_training: bool = False) -> Iterator[None]:
        """A block in which TRL makes a data loader: every training and evaluation begins with one."""
        given, now = vars(self.padding.settings), vars(Settings.of(self.args, **self.fixed_settings))
        if late := [f"`{name}={now[name]}`" for name in given if now[name] != given[name]]:
            raise ValueError(
                f"Changed after this trainer was made (perhaps by {OFF}): {', '.join(late)}. Make a new one."
            )
        callbacks = self.callback_handler.callbacks if self.padding.settings.padding_free else ()
        if any(isinstance(callback, PaddingRemover) for callback in callbacks):
            raise TypeError(f"{type(self).__name__} removes padding itself. Leave the callback out.")
        with self.padding.in_use():
            self._follow_models()  # after `model_init`; data loaders read the handle of the model
            if is_training and self.padding.settings.changed:
                if outermost_pretrained(self.model) != outermost_pretrained(self.model_wrapped):
                    raise ValueError(
                        "`trainer.model` was replaced, but transformers would train the first model, which is in "
                        "`trainer.model_wrapped`. Make a new trainer."
                    )
                observe_user_step(self)
            with entered(part.around_dataloader(dataset, is_training) for part in self.padding.parts):
                yield

    @contextlib.contextmanager
    def around_user_step(self, name: str) -> Iterator[None]:
        """A block with the user's method `name` in a training step. Outside of `compute_loss`, nothing is compared."""
        padded = all_padded(self.padding.handles, self.padding.task.why_padded({}))
        counted = entered(part.count_beside("train") for part in self.padding.parts if isinstance(part, TokenCounts))
        with self.padding.in_use(), self._unchecked(name), padded, counted:
            yield

    def _unchecked(self, name: str | None) -> contextlib.AbstractContextManager[None]:
        """A block with code of `name`. With the parity check, it is padded where nothing compares the loss."""
        handles = self.padding.handles if name and self.padding.settings.parity_check else ()
        return within(unchecked=dict.fromkeys(handles, OWN_STEP.format(name)))

    # -- steps

    @hook
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        around = entered(part.around_training_step() for part in self.padding.parts)
        with self.padding.in_use(), self._unchecked(type(self).__name__), around, observe_user_loss(self):
            return super().training_step(*args, **kwargs)

    @observe_loss
    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.padding.budget is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        return self.padding.budget.compute_loss(super().compute_loss, model, inputs, *args, **kwargs)

    @contextlib.contextmanager
    def observe_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], arguments: dict[str, Any] | None = None
    ) -> Iterator[Step]:
        """
        A block with the forwards of policy and reference on one batch.

        The parts compare them with padded ones on the first batch, split them within the token budget, and count
        them. A nested block only updates the batch. Each block reads its tensors again, because user code may have
        written to them.
        """
        padding, is_outer = self.padding, self.padding.running is None
        with padding.in_use(), batch_cache(), contextlib.ExitStack() as stack:
            if is_outer:  # another trainer may have evaluated the model since the last step
                self._follow_models()
            mode = "train" if self.model.training else "eval"
            number = self.state.global_step + (mode == "train")
            step = Step(model, inputs, mode, number, padding.task, arguments or {})
            around = [part.around_step for part in padding.in_steps] if is_outer else []
            handles = [h for h in padding.handles if is_outer or h.enabled]  # a padded step counts once
            stack.enter_context(temporarily_set(padding, running=step))
            stack.enter_context(within(unchecked=None))
            # Not only for models that get labels: a loss may also use logits and completion masks.
            step.why_padded = padding.task.why_padded(inputs)
            # Within the parts: the parity check may add a reason, and others count padded calls.
            with entered(block(step) for block in around), all_padded(handles, step.why_padded):
                yield step

    @hook
    def prediction_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # Within our loop, `Parity` has set a method on the trainer.
        own_loop = None if "prediction_step" in vars(self) else custom_method(self, {"evaluation_loop"})
        apart = {"why_padded": OWN_LOOP.format(own_loop)} if own_loop and self.padding.settings.parity_check else {}
        own_inputs = self._unchecked(custom_method(self, INPUT_METHODS))
        with self.padding.in_use(), temporarily_set(self.padding, **apart), observe_user_loss(self), own_inputs:
            loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        return loss, *self.padding.task.metrics_inputs(inputs, logits, labels)

    @hook
    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        with entered(part.around_label_count() for part in self.padding.parts):
            return super()._get_num_items_in_batch(batch_samples, device)

    # -- evaluation and log

    @hook
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        evaluation = Evaluation(metric_key_prefix, prediction_loss_only)
        around = entered(part.around_evaluation_loop(evaluation) for part in self.padding.parts)
        with self.padding.in_use(), around:
            evaluation.output = super().evaluation_loop(
                dataloader, description, evaluation.loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )
        return evaluation.output

    @hook
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for part in self.padding.parts if self.padding.running is None else ():  # a user's loss may log, too
            part.log(logs, "train" if self.model.training else "eval")
        super().log(logs, *args, **kwargs)

    # -- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        # `training_args.bin` is a pickle of the configuration: TRL's class loads without this package.
        with temporarily_set(self, args=trls_configuration(self.args)):
            super()._save(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with temporarily_set(self, args=trls_configuration(self.args)):
            super()._push_from_checkpoint(checkpoint_folder)


def arguments_by_name(owners: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an `__init__` by name. Each of `owners` defines one, and passes `*args` on to the next."""
    signature = inspect.signature(owners[0].__init__)
    try:
        named = dict([*signature.bind(None, *args, **kwargs).arguments.items()][1:])  # without `self`
    except TypeError as error:
        renamed = " It is `processing_class` now." if "'tokenizer'" in str(error) else ""
        raise TypeError(f"{owners[0].__name__}.__init__() {error}.{renamed}") from None
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    args = named.pop(kinds.get(inspect.Parameter.VAR_POSITIONAL), ())
    kwargs = named.pop(kinds.get(inspect.Parameter.VAR_KEYWORD), {})
    try:
        return named | (arguments_by_name(owners[1:], args, kwargs) if args or kwargs else {})
    except TypeError:  # the next class has parameters that this one fills in itself
        return named | kwargs


def _show_parameters(cls: type) -> None:
    """Let `inspect` show the parameters of TRL's `__init__`: scripts for several versions of TRL ask for them."""
    init, package = cls.__init__, package_of(PaddingFreeMixin)
    if package_of(init) != package:  # a user's, or one that shows TRL's already
        return
    declared = next(vars(c)["__init__"] for c in cls.__mro__ if package_of(vars(c).get("__init__", init)) != package)

    @wraps(declared)
    def shown(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    vars(shown)["__signature__"] = inspect.signature(declared)  # `getfullargspec` does not follow `wraps`
    cls.__init__ = shown  # type: ignore[misc]
