"""The parity check of a trainer: packed against padded on the first batch of training and of evaluation."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ...core.anatomy import find_peft, find_pretrained
from ...core.call.arguments import DecoderInputs
from ...core.call.layout_of import layout_of
from ...core.context import of_this_thread, temporarily_set
from ...core.errors import UnpackableCallError
from ...core.handle import PaddingRemoval
from ...core.model.inspection import bind, parameters_of
from ...core.model.older import has_cache
from ...core.model.patching import Attachment, ForwardPatch
from ...core.parity.check import check_parity
from ...core.parity.report import ParityError, ParityReport
from ..checks.user_code import custom_loss_name, custom_method
from ..distributed import is_sharded, models_of, named_models_of, on_any_process, raise_on_all
from ..messages import say
from .metrics_parity import MetricsParity
from .parity_schedule import ParitySchedule
from .part import Evaluation, PaddingFreeTrainer, Part, Step, all_padded
from .step_parity import BOTH, NO_PADDING, REFILLED, ZEROED, StepReport, check_step, few_items, is_told, precision_in


__all__ = ["NOT_COMPARED", "OWN_LOOP", "OWN_STEP", "READS_PADDING", "Parity", "compare", "first_call", "print_reports"]

logger = get_logger(__name__)

LAYOUT_ARGUMENTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens_q")
"""Arguments of a model that determine the layout of its tokens."""

READS_PADDING = (
    "a loss that depends on padding, although the model's scores do not: your loss reads logits or states at padding, "
    "which are zero without it. Mask by `attention_mask` what your loss reads; with left padding that includes the "
    "label of a row's first token"
)
STATISTICS = (
    "a loss that depends on padding, which changes scores of real tokens: your loss calls the model without "
    "`attention_mask`, or a module takes statistics of the batch in training. Pass the mask, or replace the module"
)
MIXES_ROWS = (
    "a loss that changes without padding: it or the model mixes rows, or it reads what layers keep. Leave out "
    "`max_tokens_per_batch` (some rows at a time) and `prefix_sharing` (shared tokens once)"
)

NOT_COMPARED = (
    "The loss of {} is not compared: its batches lack `input_ids` and `attention_mask`. If it reads padding, mask it."
)

OWN_STEP = (
    "`{}` calls the model outside of `compute_loss`, where nothing compares the loss with its padded value. Compute "
    "it in `compute_loss`; or mask padding in it, and set `parity_check=False`."
)
OWN_LOOP = (
    "logits that `{}` may read at padding, where packed ones are zero. Call `super().evaluation_loop`; or mask "
    "padding, and set `parity_check=False`"
)


class Parity(Part):
    """
    `parity_check`: before the first forwards of each mode, each model computes some of their rows packed and padded.

    Gradients of the trained model are compared, too. If `Task.padded_batches` finds no batch, the check runs on the
    first call of the model in the step: after its forwards, before the optimizer changes the weights.

    Then the trainer's own step is compared, on a few rows of the batch ([`check_step`]), and again on each batch until
    one has a gradient, as [`ParitySchedule`] says. If padding removal changes its loss or gradient, although the
    model is right, this and all later steps are computed padded. If metrics of an evaluation read padding
    ([`MetricsParity`]), evaluations are computed padded.
    """

    def attach_to_models(self) -> None:  # a model is compared on its own first batches
        self.trainer.padding.parity.clear()
        self._first_steps: dict[str, int] = {}  # of each mode
        self._is_cut_off = False
        self._schedules: dict[str, ParitySchedule] = {}
        self._begin_steps("train", "eval")

    def _begin_steps(self, *modes: str) -> None:
        """Compare the trainer's steps of these modes, and the metrics, on the batches that follow."""
        padding, trainer = self.trainer.padding, weakref.proxy(self.trainer)
        for mode in modes:
            padding.loss_parity.pop(mode, None)
            self._schedules[mode] = ParitySchedule(trainer, self.settings.parity_check)
        padding.why_padded = None if "train" in modes else padding.why_padded
        padding.why_eval_padded = self._why_loss_padded = None
        self._metrics = MetricsParity(trainer, self.settings.parity_check)

    @contextlib.contextmanager
    def around_dataloader(self, dataset: Any, is_training: bool) -> Iterator[None]:
        """Begin again if a training or evaluation begins: since the last one, a notebook may have changed the loss."""
        trainer, padding = self.trainer, self.trainer.padding
        own_metrics = trainer.compute_metrics or custom_method(trainer, {"prediction_step"})
        is_due = custom_loss_name(trainer) or own_metrics or padding.why_padded or padding.why_eval_padded
        if is_due and (is_training or not trainer.is_in_train):
            self._begin_steps(*(("train", "eval") if is_training else ("eval",)))
        yield

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        failed = None
        if self._is_cut_off:  # an interrupt has ended the last step in a check
            self.attach_to_models()
            step.why_padded = self.trainer.padding.task.why_padded(step.inputs)
        self._is_cut_off = True
        if not self._first_steps:  # a user adds hooks between `__init__` and `train`
            for handle in self.trainer.padding.handles:
                handle.accept_hooks()
        try:
            with self._model_compared(step):
                if self._is_step_due(step):
                    step.why_padded = self.trainer.padding.why_padded = self._compare_step(step)
                self._is_cut_off = False  # an error of the step itself ends no check
                yield
                self._is_cut_off = True
        except ParityError as error:
            failed = error
        # Only in the first step, because the host waits for the other processes here. All of them must call it.
        if self._first_steps.setdefault(step.mode, step.number) == step.number:
            raise_on_all(failed)
        elif failed is not None:
            raise failed
        self._is_cut_off = False

    @contextlib.contextmanager
    def around_evaluation_loop(self, evaluation: Evaluation) -> Iterator[None]:
        trainer, padding, predict = self.trainer, self.trainer.padding, self.trainer.prediction_step
        own = custom_method(trainer, {"prediction_step"}) is not None

        @wraps(predict)  # so that a user's function, which was set on the trainer, is still found
        def compared(model: torch.nn.Module, inputs: Any, loss_only: bool | None, *args: Any, **kwargs: Any) -> Any:
            def padded() -> list[dict[str, torch.Tensor]]:
                return padding.task.padded_batches(inputs) if padding.handles else []

            def rows() -> list[Any]:  # none if the batch cannot be cut
                of_type = dict if isinstance(inputs, dict) else type(inputs)
                return [*map(of_type, few_items(trainer, inputs)[0][:1])]

            with temporarily_set(padding, running=None, in_steps=(), why_padded=None):
                self._metrics.compare(trainer, padding.handles, predict, loss_only, padded, rows)
            reason = padding.why_eval_padded = self._why_loss_padded or self._metrics.why_padded
            # Steps run padded, and count that. A method of the user may call the model outside of a step.
            # Processes that shard a model meet in each forward, and may not all have such a call.
            is_due = own and self._is_model_due("eval") and not is_sharded(trainer)
            around = self._model_compared_on_first_call("eval", model) if is_due else contextlib.nullcontext()
            own_padded = all_padded(padding.handles, reason if own else None)
            with temporarily_set(padding, why_padded=None if own else reason), own_padded, around:
                result = predict(model, inputs, loss_only, *args, **kwargs)
                if padding.why_padded and not reason:  # this step was compared
                    padding.why_eval_padded = self._why_loss_padded = padding.why_padded
            return result

        with temporarily_set(trainer, prediction_step=compared):
            yield

    # -- the models

    def _is_model_due(self, mode: str) -> bool:
        """Whether the models are compared in the next forwards of a mode, as far as this is known before they run."""
        padding = self.trainer.padding
        is_new = self.settings.parity_check and bool(padding.handles) and mode not in padding.parity
        # With hooks that are registered after the first step, calls run padded from then on.
        return is_new and not (padding.parity and padding.handle.has_changed)

    @contextlib.contextmanager
    def _model_compared(self, step: Step) -> Iterator[None]:
        """A block with the forwards of a step: the models are compared before it, or on their first call in it."""
        if not self._is_model_due(step.mode):
            yield
        elif step.batches:
            failed = self._compare_model(step)
            yield
            if failed is not None:
                raise failed
        else:
            for handle in self.trainer.padding.handles:
                handle.accept_hooks()  # the comparison after these forwards checks them
            said = self.trainer.padding.loss_parity[step.mode] = NOT_COMPARED.format(type(self.trainer).__name__)
            self._tell(said, logger.warning if custom_loss_name(self.trainer) else say)
            with self._model_compared_on_first_call(step.mode, step.model):
                yield

    def _compare_model(self, step: Step) -> Exception | None:
        """
        Compare the models on the batches of a step.

        Returns an error for the end of the step: with several processes, and for a batch that the model itself
        refuses, because TRL's own error may say more.
        """
        padding = self.trainer.padding
        failed: Exception | None = None
        packed = [will_pack(padding.handle, batch) for batch in step.batches]
        if self.trainer.accelerator.num_processes > 1 and is_sharded(self.trainer):  # they meet in each forward
            packed = [all(of_batch) for of_batch in zip(*gather_object([packed]), strict=True)]
        for batch, is_packed in zip(step.batches, packed, strict=True):
            if is_packed:
                inputs = {name: step.inputs[name] for name in step.inputs.keys() & {"labels"}} | batch
                if (multimodal := padding.handle.multimodal) is not None:
                    # Its arguments besides ids, mask and labels: pixels, grids, token types.
                    names = parameters_of(multimodal.forward).keys() - {"input_ids", "attention_mask", "labels"}
                    inputs |= {k: v for k, v in padding.task.parity_inputs(step.inputs, batch).items() if k in names}
                try:
                    self._compare(step.mode, step.model, inputs)
                except (ParityError, ValueError) as error:
                    if isinstance(error, ParityError) and self.trainer.accelerator.num_processes == 1:
                        raise
                    failed = failed or error  # other processes wait for the forwards of this one
        if failed is None:
            self._print_reports(step.mode)
        return failed

    @contextlib.contextmanager
    def _model_compared_on_first_call(self, mode: str, model: torch.nn.Module) -> Iterator[None]:
        """A block at whose end, after a backward and before the weights change, its first packed call is compared."""
        padding = self.trainer.padding
        with first_call(model, padding.handle) as call:
            yield
        if call and mode not in padding.parity:  # a `compute_loss` in the block has compared its batch
            self._compare(mode, model, call)
            self._print_reports(mode)

    def _compare(self, mode: str, model: torch.nn.Module, inputs: dict[str, Any]) -> None:
        """
        Compare the models on one batch.

        Raises:
            ParityError: If packed and padded differ.
        """
        trainer = self.trainer
        reports = trainer.padding.parity.setdefault(mode, [])
        try:
            compare(trainer, [model, *models_of(trainer)[1:]], inputs, reports, gradients=mode == "train")
        except UnpackableCallError:  # as in `will_pack`: the model around the decoder may not pack, either
            if self.settings.strict or is_sharded(trainer):  # processes that shard a model meet in each forward
                raise
            if not reports:
                del trainer.padding.parity[mode]

    def _print_reports(self, mode: str) -> None:
        """Print the training reports, which include gradients; evaluation reports only if nothing is trained."""
        padding = self.trainer.padding
        if mode in padding.parity and is_told(self.trainer, mode) and not padding.is_dry_run:  # its table has them
            print_reports(self.trainer, padding.parity[mode])

    def _tell(self, text: str, tell: Callable[[str], None] = say) -> None:
        """Tell a text once, on one process of each machine."""
        if self.trainer.accelerator.is_local_main_process:
            self.trainer.padding.handles[0].say_once(text, tell=tell)

    # -- the trainer's step

    def _is_step_due(self, step: Step) -> bool:
        """Whether all processes compare the trainer's step on this batch; if so, sets the next batch."""
        padding, schedule = self.trainer.padding, self._schedules[step.mode]
        if not schedule.is_active or not padding.handles or not step.batches or padding.why_padded:
            return False
        reports = padding.parity.get(step.mode, [])
        # Where padded is wrong, or the model's check has failed, there is nothing to compare with. With `why_padded`,
        # this batch is computed padded anyway.
        is_clear = bool(reports) and all(r.ok and r.padded_is_right for r in reports) and step.why_padded is None
        return schedule.is_due(step.batches, is_clear)

    def _compare_step(self, step: Step) -> str | None:
        """Compare the trainer's step; returns why its loss changes without padding, or `None`."""
        trainer, schedule = self.trainer, self._schedules[step.mode]
        begin = time.perf_counter()
        report = check_step(trainer, step, gradients=step.mode == "train" and torch.is_grad_enabled())
        verdict = None if isinstance(report, str) else schedule.verdict(report.ok, report.is_zero)
        if isinstance(report, str) or verdict is not False:
            self._tell_outcome(step.mode, report, verdict, time.perf_counter() - begin)
            return None
        if report.error:
            return f"a loss that raises an error without padding: {report}"
        # On each process, before any of them returns.
        changes = {name: on_any_process(trainer, not most.allow(*x)) for name, (x, most) in report.found.items()}
        if report.repeated:
            text = "a loss that changes from call to call (this comparison calls it too): {:.6g}, then {:.6g} on one"
            return text.format(*report.repeated) + " batch. If it reads no logits at padding, set `parity_check=False`"
        cause = STATISTICS if changes[BOTH] else READS_PADDING if changes[ZEROED] or changes[REFILLED] else MIXES_ROWS
        return f"{cause}. Or set `padding_free=False`. The loss {report}"

    def _tell_outcome(self, mode: str, report: StepReport | str, verdict: bool | None, seconds: float) -> None:
        """Keep the outcome of a comparison that found no fault, and tell it unless the table of a dry run has it."""
        padding, schedule, tell = self.trainer.padding, self._schedules[mode], say
        if isinstance(report, str):
            name = custom_loss_name(self.trainer) if report != NO_PADDING else None
            tell = logger.warning if name or "it raises" in report else say
            outcome = f"{f'`{name}`' if name else 'the loss'} was not compared with its padded value: {report}"
            outcome += ". If it reads logits at padding (zeros), mask them, or set `padding_free=False`." * bool(name)
        elif verdict is None:
            then = "the next batch is compared" if schedule.is_active else f"none is compared after {schedule.zeros}"
            outcome = f"parity not tested, the trainer's own loss: zero or no gradient on {report.items}; {then}"
        else:
            untested = "; not tested on padding, because the batch has none" if schedule.is_active else ""
            outcome = f"parity ok, the trainer's own loss: {report}{untested}; {seconds:.1f} s"
        padding.loss_parity[mode] = outcome
        if not padding.is_dry_run and (isinstance(report, str) or is_told(self.trainer, mode)):
            self._tell(outcome, tell)


def compare(
    trainer: PaddingFreeTrainer,
    models: list[Any],
    inputs: dict[str, Any],
    reports: list[ParityReport],
    *,
    gradients: bool,
) -> None:
    """
    Compare packed with padded for each model of a trainer, on the same inputs; append one report each to `reports`.

    With `gradients` the gradients of the first model are compared, too.

    Raises:
        ParityError: If packed and padded differ.
    """
    sharded, compared = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled, len(reports)
    # GOLD's teacher has a tokenizer, and so ids, of its own. Processes that shard models compare all of them.
    most = int(inputs["input_ids"].max()) if "input_ids" in inputs and not sharded else 0
    sizes = (getattr(find_pretrained(m).config.get_text_config(), "vocab_size", most + 1) for m in models)
    models = [m for m, size in zip(models, sizes, strict=True) if size > most or m is models[0]]
    for model in models:
        # Sharded weights are gathered by the hooks of the wrapper, so the check has to call the wrapped model.
        trains, unwrapped = gradients and model is models[0], trainer.accelerator.unwrap_model
        dtype, model = precision_in(trainer, model), model if sharded else unwrapped(model)
        report = check_parity(model, inputs, dtype=dtype, gradients=trains)
        reports.append(report)
        if not (report.compared and report.has_mask):
            logger.warning(str(report))
        handle = PaddingRemoval.of(model)
        if report.ok and report.fault and handle is not None:
            handle.say_once(f"{report.fault}. The run stays packed; padded runs have this error. {report}.", "fault")
    for report in reports[compared:]:  # after all forwards, which processes that shard the models compute together
        report.raise_if_failed()


def will_pack(handle: PaddingRemoval, call: dict[str, Any]) -> bool:
    """Whether the decoder packs a `call` of a model. Images are left out: the decoder receives their embeddings."""
    try:
        inputs = DecoderInputs.read({name: call[name] for name in LAYOUT_ARGUMENTS if name in call}, handle)
        return layout_of(inputs, handle) is not None
    except UnpackableCallError:  # it is computed padded, and another batch is compared
        return False


def print_reports(trainer: PaddingFreeTrainer, reports: list[ParityReport]) -> None:
    """
    Print one line per model of the trainer: its name, and the comparison with the largest difference.

    `reports` come from [`compare`], for one batch or several.
    """
    models = named_models_of(trainer)
    for i, (role, model) in enumerate(models.items()):
        # `compare` appends one report per model and batch, so every `len(models)`-th report is of model `i`.
        compared = [report for report in reports[i :: len(models)] if report.compared and report.has_mask]
        if compared and trainer.accelerator.is_local_main_process:
            pretrained = find_pretrained(model)
            name = Path(pretrained.config.name_or_path or "").name or type(pretrained).__name__
            say(f"{name} ({role}): {max(compared, key=lambda report: report.maximum)}")


@contextlib.contextmanager
def first_call(model: torch.nn.Module, handle: PaddingRemoval) -> Iterator[dict[str, Any]]:
    """A block that records the first call of a model that `handle` packs: its tensors by name, empty until then."""
    call: dict[str, Any] = {}
    outer: dict[str, Any] = {}  # of a user's module around the model, which may need its labels
    # A training calls the transformers model, or the PEFT model around it. PEFT before 0.21 calls only the `forward`
    # of the inner model, so that hooks of the inner model never run.
    called = find_peft(model) or find_pretrained(model)

    @of_this_thread
    def keep(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        arguments = {} if call else bind(module.forward, args, kwargs)  # once: the hook and the patch may both run
        tensors = {k: v.detach() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
        if module is not called:
            outer.update({name: x for name, x in tensors.items() if name == "labels"})
        elif tensors and not has_cache(kwargs) and will_pack(handle, tensors):
            call.update(outer | tensors)

    class Recorder(ForwardPatch):
        def call(self, *args: Any, **kwargs: Any) -> Any:
            keep(self.module, args, kwargs)
            return self.wrapped(*args, **kwargs)

    recording = Attachment(model)
    recorders = [Recorder(module, recording) for module in dict.fromkeys((model, called))]
    # A hook, because ms-swift embeds images in another hook, which runs later: the patch only sees embeddings. And a
    # patch, because sentence-transformers calls `model.forward`, which runs no hooks.
    with called.register_forward_pre_hook(keep, with_kwargs=True, prepend=True), recording.attach(recorders):
        yield call
