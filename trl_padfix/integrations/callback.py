"""
`PaddingRemovalCallback`: padding removal for any trainer of transformers.

It needs no trainer class of this package and no TRL. The plug-ins of other stacks are built on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, extract_model_from_parallel, reduce
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from ..core.anatomy import find_decoder, find_pretrained
from ..core.call.batch_cache import batch_cache
from ..core.context import set_until_closed, temporarily_set, within
from ..core.errors import PaddingRemovalError, UnpackableCallError
from ..core.handle import Lengths, PaddingRemoval, PaddingStats, PrefixSharing, check_multiple, check_prefix_sharing
from ..core.parity.limits import Limits, lowest_dtype
from ..core.parity.report import ParityError, ParityReport
from ..core.remove import remove_padding
from ..core.switch import is_off
from ..trainers.checks.user_code import custom_loss_name, custom_method, why_padded
from ..trainers.distributed import PaddingRemover, check_launch, models_of, splitting_parallelism
from ..trainers.messages import say
from ..trainers.metrics.token_counts import NO_MASK, TokenCounter, report_of
from ..trainers.parts.metrics_parity import MetricsParity
from ..trainers.parts.parity import NOT_COMPARED, OWN_STEP, READS_PADDING, compare, first_call, print_reports
from ..trainers.parts.parity_schedule import ParitySchedule
from ..trainers.parts.part import Padding, all_padded
from ..trainers.parts.saved_state import saved_state
from ..trainers.parts.step_parity import Filling, has_padding, other_outputs, other_padding, without_packing


__all__ = ["PaddingRemovalCallback", "callback_from", "in_words", "settings_in"]

logger = get_logger(__name__)

PREFIX = "padfix_"

NOT_COVERED = (
    "Padding is removed from the model alone, since transformers passes no trainer to callbacks. A reference model "
    "stays padded, trackers get no `padfix/` metrics, and your loss and metrics are not checked: they get packed "
    "values if they read padding, or what hooks within the model keep. To cover these, call "
    "`callback.attach(trainer)` before training."
)

SCORES_PADDING = (
    "a loss that depends on padding: the model predicts a label from padding (set `tokenizer.padding_side='right'`), "
    "or pools a token at padding (set its `config.pad_token_id` to the tokenizer's)"
)

OR_STATISTICS = ". Or a module takes statistics of the batch in training"

PACKS = "packs rows before the model is called, so there is no padding to remove and no prefix to share."
"""What a setting of another stack does that is refused beside the callback."""


_attached_by: WeakKeyDictionary[Any, ref[PaddingRemovalCallback]] = WeakKeyDictionary()
"""The callback that each handle belongs to. Not an attribute of the handle, which a deep copy of the model copies."""


class _Accelerator(AcceleratorState):
    """The state that the trainer's `Accelerator` has set, with the methods of it that are used here."""

    unwrap_model = staticmethod(extract_model_from_parallel)
    reduce = staticmethod(reduce)

    @property
    def state(self) -> AcceleratorState:
        return self

    @property
    def native_amp(self) -> bool:
        """Whether forwards run under autocast; `fp16=True` on a CPU computes in float32."""
        return self.mixed_precision == "bf16" or (self.mixed_precision == "fp16" and self.device.type != "cpu")


def _policy_alone(model: Any, args: TrainingArguments) -> SimpleNamespace:
    """Stands for the trainer if none was attached: the model and the arguments that transformers passes."""
    not_sharded = {"is_fsdp_enabled": False, "is_deepspeed_enabled": False}
    return SimpleNamespace(model=model, model_wrapped=model, args=args, accelerator=_Accelerator(), **not_sharded)


ATTACHED, TRAINING, STEPPED = "attached", "training", "stepped"
"""The phases of a [`_Run`], in their order."""


@dataclass
class _Run:
    """
    One training of a callback, from its attachment to the models until it detaches from them.

    Attributes:
        trainer ([`~transformers.Trainer`]): The trainer, or [`_policy_alone`].
        schedules (`dict`): The batches on which the loss is compared, by whether gradients are computed.
        metrics ([`MetricsParity`]): The check of the metrics of evaluations.
        phase (`str`): `ATTACHED` before the training, then `TRAINING`, and `STEPPED` after its first step.
        mode (`str`): `"eval"` within an evaluation, else `"train"`.
        why_padded (`str`): Why all steps are computed padded; empty if they are packed.
        first_call (`dict`, *optional*): Arguments of the first packed call; `None` if they are not to be compared.
        recording (`ExitStack`): Ends the recording of that call.
        undo (`ExitStack`): Detaches from the models.
        compute_loss (`Callable`, *optional*): The trainer's, as [`PaddingRemovalCallback._pad_steps`] has set it.
        counters (`dict`): Tokens of each mode.
        counted ([`PaddingStats`]): The counts of the policy that are in the counters.
    """

    trainer: Any
    schedules: dict[bool, ParitySchedule]
    metrics: MetricsParity
    phase: str = ATTACHED
    mode: str = "train"
    why_padded: str = ""
    first_call: dict[str, torch.Tensor] | None = None
    recording: ExitStack = field(default_factory=ExitStack)
    undo: ExitStack = field(default_factory=ExitStack)
    compute_loss: Callable[..., Any] | None = None
    counters: dict[str, TokenCounter] = field(default_factory=lambda: {m: TokenCounter() for m in ("train", "eval")})
    counted: PaddingStats = field(default_factory=PaddingStats)


class PaddingRemovalCallback(PaddingRemover):
    """
    Removes padding while any [`~transformers.Trainer`] trains.

    When training begins, the callback attaches to the policy. After the first batch, before a weight changes, it
    compares packed and padded forwards. The log gets `padfix/pad_fraction`, `padfix/shared_fraction` and
    `perf/tokens_per_second` (real tokens of the policy's forwards). When training ends, the callback detaches. Loss,
    loop and data stay the trainer's.

    transformers passes the model to callbacks, and not the trainer. Call [`~PaddingRemovalCallback.attach`] before
    `trainer.train()`. Without `attach`, the callback warns that it leaves out: the reference or teacher,
    DeepSpeed and FSDP, losses that need padded batches, and metrics for trackers.

    Args:
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Whether shared prefixes of the rows of a batch are computed once, as in [`remove_padding`].
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether packed and padded forwards are compared on the first batch.
        pool_last_token (`bool`, *optional*, defaults to `False`):
            Whether a sequence classifier scores the last token of each row's attention mask.
        packed_multiple_of (`int` or `list[int]`, *optional*):
            Lengths of packed rows, as in [`remove_padding`].
        attn_implementation (`str`, *optional*):
            Attention implementation while the trainer trains, as in [`remove_padding`].

    Attributes:
        handles (`list[PaddingRemoval]`): Handles of the current or last training: policy, then reference or teacher.
        reports (`list[ParityReport]`): Reports of the parity check, in the same order.

    Raises:
        ValueError: For an invalid `prefix_sharing` or `packed_multiple_of`; when training begins, if padding removal
            is attached already.
        TypeError: When training begins, if the trainer's model contains no transformers model, or more than one.
        PaddingRemovalError: When training begins, for a model that cannot be packed, or that DeepSpeed or FSDP has
            wrapped already; with `torch_compile`.
        ParityError: On the first batches, if packed results of a model are wrong.

    Example:

    ```python
    from transformers import Trainer
    from trl_padfix import PaddingRemovalCallback

    callback = PaddingRemovalCallback(prefix_sharing="auto")
    trainer = Trainer(model, args, train_dataset=rows)
    callback.attach(trainer)
    trainer.train()
    ```
    """

    words: Mapping[str, str] = {"`padding_free=False`": "no `PaddingRemovalCallback`"}
    """Settings that errors name, each with the text that replaces it where this callback runs; see [`in_words`]."""

    def __init__(
        self, prefix_sharing: PrefixSharing = False, *, parity_check: bool = True, pool_last_token: bool = False,
        packed_multiple_of: Lengths | None = None, attn_implementation: str | None = None,
    ):  # fmt: skip
        check_prefix_sharing(prefix_sharing)
        check_multiple(packed_multiple_of)
        self.prefix_sharing: PrefixSharing = prefix_sharing
        self.parity_check = parity_check
        self._attach_one = partial(
            remove_padding, pool_last_token=pool_last_token, packed_multiple_of=packed_multiple_of,
            attn_implementation=attn_implementation,
        )  # fmt: skip
        self.handles: list[PaddingRemoval] = []
        self.reports: list[ParityReport] = []
        self._given: Trainer | None = None
        self._state: TrainerState | None = None  # of the current or last training
        self._run: _Run | None = None  # while it is attached

    @property
    def stats(self) -> PaddingStats | None:
        """Token counts of the packed forwards of the policy, in the last training."""
        return self.handles[0].stats if self.handles else None

    def attach(self, trainer: Trainer) -> None:
        """
        Attach to the models of a trainer now, and again when it trains a second time. Replaces an earlier callback.

        Args:
            trainer ([`~transformers.Trainer`]):
                The trainer, before its `train()`. It gets this callback if it does not have it.

        Raises:
            TypeError, ValueError, PaddingRemovalError: As above.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(f"`attach` takes the trainer, not its model; got `{type(trainer).__name__}`.")
        if isinstance(own := getattr(trainer, "padding", None), Padding) and own.settings.padding_free:
            raise TypeError(f"{type(trainer).__name__} removes padding itself. Leave the callback out.")
        callbacks = trainer.callback_handler.callbacks
        # An earlier one is of a cell that runs again.
        for earlier in [c for c in callbacks if isinstance(c, PaddingRemovalCallback) and c is not self]:
            earlier.remove()
            trainer.remove_callback(earlier)
        if self not in callbacks:
            trainer.add_callback(self)
        self._given = trainer
        self._pad_steps(self._begin(trainer))  # an evaluation may come before the training

    def _begin(self, trainer: Any) -> _Run:
        """Attach to the models of a trainer, or of a stand-in."""
        self.remove()
        if splitting_parallelism(trainer.accelerator, "cp_size"):
            raise PaddingRemovalError(
                "`cp_size` splits rows over processes, but a callback cannot split the inputs of the trainer's loss. "
                "Use a trainer of this package, or train without context parallelism."
            )
        models = models_of(trainer)
        if trainer.args.torch_compile or any(model._compiled_call_impl is not None for model in models):
            raise PaddingRemovalError(
                "The whole model is compiled (`torch_compile`, `model.compile()`), and would not call the packed "
                "forward. Leave it uncompiled, or use a trainer of this package (`padding_free_trainer`), which "
                "compiles single layers."
            )
        is_checked = self.parity_check and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
        schedules = {grad: ParitySchedule(trainer, is_checked, needs_padding=True) for grad in (True, False)}
        self.handles, self.reports, self._run = [], [], _Run(trainer, schedules, MetricsParity(trainer, is_checked))
        self._attach_to(models, self._run)
        if self.parity_check:
            recorded = first_call(trainer.model, self.handles[0])
            self._run.first_call = self._run.undo.enter_context(self._run.recording).enter_context(recorded)
        return self._run

    def _attach_to(self, models: list[Any], run: _Run) -> None:
        try:
            with in_words(self.words):
                check_launch(run.trainer)
                for model in models:
                    self._remove_padding(run, model)
        except BaseException:
            self.remove()
            raise

    def _remove_padding(self, run: _Run, model: torch.nn.Module) -> None:
        attached = PaddingRemoval.of(model)
        if attached is not None and attached in _attached_by:
            earlier = _attached_by[attached]()
            # Two callbacks may belong to one trainer, or to one training.
            pairs = ((self._given, earlier._given), (self._state, earlier._state)) if earlier else ()
            if not any(one is other is not None for one, other in pairs):
                (earlier or attached).remove()  # a training that raised an error, in a notebook, has left it
        handle = self._attach_one(model, prefix_sharing=self.prefix_sharing)
        handle.name = f"callback.handles[{len(self.handles)}]"
        self.handles.append(run.undo.enter_context(handle))
        _attached_by[handle] = ref(self)

    def _pad_steps(self, run: _Run) -> None:
        """Compute a batch padded if its loss or metrics need states that a packed forward does not have."""
        trainer, compute, predict = run.trainer, run.trainer.compute_loss, run.trainer.prediction_step

        @wraps(compute)  # so that a user's function, which was set on the trainer, is still found
        def compute_loss(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with batch_cache(), within(unchecked=None):
                if run.schedules[torch.is_grad_enabled()].is_active and not run.why_padded:
                    self._check_loss(run, inputs, lambda batch: compute(model, batch, *args, **kwargs))
                with all_padded(self.handles, run.why_padded or why_padded(trainer, self.handles[0], inputs)):
                    return compute(model, inputs, *args, **kwargs)

        @wraps(predict)
        def prediction_step(
            model: torch.nn.Module, inputs: Any, prediction_loss_only: bool | None, *args: Any, **kwargs: Any
        ) -> Any:
            def rows() -> list[Any]:
                return [copy(inputs)] if isinstance(inputs, Mapping) else []

            with temporarily_set(trainer, compute_loss=compute):
                run.metrics.compare(trainer, self.handles, predict, prediction_loss_only, padded=rows, rows=rows)
            with all_padded(self.handles, run.metrics.why_padded):
                return predict(model, inputs, prediction_loss_only, *args, **kwargs)

        if self.parity_check and (own := custom_method(trainer, {"training_step"})):
            own_step = within(unchecked=dict.fromkeys(self.handles, OWN_STEP.format(own)))
            # ms-swift's GRPO scores completions in `_prepare_inputs`.
            for name, block in (("training_step", own_step), ("_prepare_inputs", within(unchecked=None))):
                set_until_closed(run.undo, trainer, name, block(getattr(trainer, name)))
        run.compute_loss = compute_loss
        set_until_closed(run.undo, trainer, "compute_loss", compute_loss)
        set_until_closed(run.undo, trainer, "prediction_step", prediction_step)

    def _check_loss(self, run: _Run, inputs: Any, compute: Callable[[Any], Any]) -> None:
        """Compute all steps padded if the loss reads padding."""
        trainer, given = run.trainer, inputs if isinstance(inputs, Mapping) else {}
        schedule = run.schedules[torch.is_grad_enabled()]
        ids, mask = (getattr(given.get(name), "shape", None) for name in ("input_ids", "attention_mask"))
        if (ids is None or mask not in (None, ids)) and custom_loss_name(trainer):  # TRL's own mask padding
            logger.warning_once(NOT_COMPARED.format(type(trainer).__name__))
        padded = [inputs] if ids is not None and ids == mask and has_padding([inputs]) else []
        if schedule.is_due(padded):
            # A packed forward returns zeros, but so does a new head for all tokens.
            fills = (None, torch.zeros_like, partial(other_outputs, torch.Generator()))
            loss, *others = (self._padded_loss(trainer, inputs, padded, compute, fill) for fill in fills)
            other = max(others, key=lambda value: abs(loss - value))
            limit = Limits.of_step(lowest_dtype(trainer.model)).mean * max(abs(loss), 1.0)
            verdict = schedule.verdict(not abs(loss - other) > limit, loss == 0 or not padded)
            if verdict is False:
                run.why_padded = (READS_PADDING if custom_loss_name(trainer) else SCORES_PADDING) + OR_STATISTICS
            elif verdict and trainer.accelerator.is_local_main_process:
                say(f"parity ok, the trainer's own loss: padded {loss:.6g}, with other values at padding {other:.6g}")

    def _padded_loss(
        self, trainer: Trainer, inputs: Any, batches: list[Any], compute: Callable, at_padding: Filling | None
    ) -> float:
        """The padded loss of a batch, perhaps with other embeddings and, from `at_padding`, outputs at padding."""
        with ExitStack() as stack:
            on_embeddings = partial(other_padding, batches, torch.Generator()) if at_padding else None
            stack.enter_context(without_packing(self.handles, on_embeddings, at_padding))
            stack.enter_context(saved_state(trainer))
            stack.enter_context(torch.no_grad())
            # A copy, because a loss may take entries out of its batch.
            found = compute(dict(inputs) if isinstance(inputs, dict) else type(inputs)(dict(inputs)))
            return float(found[0] if isinstance(found, tuple) else found)  # an evaluation asks for outputs

    def remove(self) -> None:
        """Detach from the models, as the end of a training does. Needed after a training that raised an error."""
        if self._run is not None:
            self._run.undo.close()
            self._run = None

    # -- events

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._state = state
        if self._run is not None and self._run.phase != ATTACHED:  # the last training raised an error: it had no end
            self.remove()
        trainer = self._given
        if trainer is not None and model is not None and trainer.model is not model:
            raise ValueError(
                "This callback now belongs to another trainer. Give each trainer a `PaddingRemovalCallback` of "
                "its own, or call `callback.attach(trainer)` again."
            )
        models = [] if trainer is None else models_of(trainer)
        decoders = [id(find_decoder(find_pretrained(model))) for model in models]
        attached = [id(handle.decoder) for handle in self.handles]
        # `model_init` has made another model since, or an earlier trial of a search stopped before `on_train_end`.
        begins = trainer is None or self._run is None or decoders[: len(attached)] != attached
        wrapper = AcceleratorState().distributed_type
        if begins and wrapper in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise PaddingRemovalError(
                f"{wrapper.value} has taken over the model before padding removal was attached to it, and would not "
                "call the packed forward. Call `callback.attach(trainer)` between making the trainer and its first "
                "`train()`."
            )
        if trainer is None:
            self._begin(_policy_alone(model, args))
            logger.warning(NOT_COVERED)
            return
        if begins:
            self._begin(trainer)
        assert self._run is not None
        if len(decoders) > len(self.handles):  # a plug-in attaches before TRL makes the reference
            self._attach_to(models[len(self.handles) :], self._run)
        self._run.phase = TRAINING
        if trainer.compute_loss is not self._run.compute_loss:  # another one may have been set since `attach`
            self._pad_steps(self._run)
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)  # so that `on_log` of trackers comes after ours, which adds the metrics

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.counters["train"].start()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        run, call = self._run, self._run and self._run.first_call
        if run is None or not call:
            return
        run.recording.close()
        run.first_call = None
        if "input_ids" not in call:
            logger.warning(f"Not compared on the first batch, which consists of {sorted(call)}: it has no token ids.")
            return
        models = [run.trainer.model_wrapped, *models_of(run.trainer)[1:]]
        try:
            with in_words(self.words):
                compare(run.trainer, models, call, self.reports, gradients=True)
            print_reports(run.trainer, self.reports)
        except BaseException as error:
            if not (isinstance(error, UnpackableCallError) and error.kind == "prefix sharing"):
                self.remove()  # Trainer calls no further event after an error
                raise
            # Still packed, as the line of the first step says.
            logger.warning(f"Not compared on the first batch: {error}")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._run is None:
            return
        stats = self._count(self._run, "train")
        if self._run.phase != STEPPED and not is_off():  # `TRL_PADFIX_OFF` has a message of its own
            self._report_first_step(self._run, stats)
        self._run.phase = STEPPED

    def _report_first_step(self, run: _Run, stats: PaddingStats) -> None:
        """Print how many tokens of the first step were computed, or warn that nothing was packed or compared."""
        if not stats.forwards:
            if not stats.padded_forwards:  # a warning gave the reason for these
                logger.warning(f"Nothing was packed in the first step, so no padding was removed: {NO_MASK}.")
            return
        if run.trainer.accelerator.is_local_main_process:
            removed = f"{stats.packed_tokens} of {stats.padded_tokens} tokens were computed"
            if stats.packed_tokens == stats.padded_tokens:
                removed = f"no padding was removed: the batch has none, or no `attention_mask` ({removed})"
            say(f"First step: {removed}.")
        if run.first_call is not None:  # still recording
            logger.warning(
                "Packed and padded were not compared on the first batch: a part of the model was called, not the "
                "model. `trl_padfix.check_parity(model, batch)` compares them."
            )

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.counters["train"].pause()
            self._run.mode = "eval"
            self._count(self._run, "eval")

    def _count(self, run: _Run, mode: str) -> PaddingStats:
        """Add the forwards since the last call to the counters of a mode, and return their counts."""
        counts = copy(self.handles[0].stats)
        new = counts - run.counted
        # A callback has no batches: it takes the real tokens from the forwards.
        run.counters[mode].add(new.real_tokens, new, run.trainer)
        run.counted = counts
        return new

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        # A user's loss may log, too; these are of the loop.
        if self._run is None or not any(name == "loss" or name.endswith("_runtime") for name in logs or ()):
            return
        metrics = report_of(self._run.counters, self._run.mode, self.handles[0])
        if self._run.mode == "eval":
            self.on_predict()
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # Trainer has put a copy of `logs` there before this event

    def on_predict(self, *_: Any, **kwargs: Any) -> None:
        """End an evaluation; that of `trainer.predict` is not logged."""
        if self._run is not None:
            # A report restarts the clock of its counter. That of a new one stands until the next evaluation.
            self._run.mode, self._run.counters["eval"] = "train", TokenCounter()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.remove()


def settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """
    Arguments of [`PaddingRemovalCallback`] from the keys `padfix_...` in the configuration of another stack.

    Raises:
        ValueError: For another key with that prefix.
    """
    settings = {key: value for key, value in config.items() if str(key).startswith(PREFIX) and value is not None}
    supported = [f"{PREFIX}{name}" for name in inspect.signature(PaddingRemovalCallback).parameters]
    if unknown := sorted(settings.keys() - set(supported)):
        raise ValueError(f"trl_padfix has no keys {unknown}; it has {supported}.")
    return {key.removeprefix(PREFIX): value for key, value in settings.items()}


def callback_from(config: Mapping[str, Any], without: str) -> PaddingRemovalCallback:
    """
    The callback that the keys `padfix_...` of another stack's configuration describe.

    Args:
        config (`Mapping`):
            The configuration.
        without (`str`):
            Text for errors: how to train in this stack without padding removal.
    """
    callback = PaddingRemovalCallback(**settings_in(config))
    keys = {f"`{name}=False`": f"`{PREFIX}{name}: false`" for name in ("prefix_sharing", "parity_check")}
    callback.words = {"`padding_free=False`": without} | keys
    return callback


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """A block whose errors name the settings of another stack: each key of `words` is replaced by its value."""
    try:
        yield
    except (PaddingRemovalError, ParityError) as error:
        text = str(error).replace("` in a trainer's configuration", "`")
        for ours, theirs in words.items():
            text = text.replace(ours, theirs)
        error.args = (text, *error.args[1:])
        raise
