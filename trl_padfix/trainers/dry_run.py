"""The dry run of a training: the first step without its backward."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections.abc import Sized
from copy import copy
from enum import Enum
from typing import Any

from transformers.trainer_callback import DefaultFlowCallback

from ..core.anatomy import find_pretrained
from ..core.context import context, temporarily_set
from ..core.handle import PaddingStats
from ..core.parity.report import ParityError
from ..core.switch import OFF, is_off
from .checks.user_code import observe_user_step
from .distributed import datasets_of, named_models_of
from .messages import counted
from .parts.part import Padding, PaddingFreeTrainer
from .parts.saved_state import saved_state


__all__ = ["dry_run"]

TRAINING = (
    "max_length", "max_completion_length", "learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs",
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "eval_strategy",
    "save_strategy", "report_to",
)  # fmt: skip
"""Fields of TRL's configurations that are shown, where there is one."""


class _Stop(BaseException):
    """Ends a training or an evaluation after its first batch."""


class _StopsEvaluation(DefaultFlowCallback):
    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        raise _Stop


def dry_run(trainer: PaddingFreeTrainer) -> bool:
    """
    Check a training without taking a step: the first batch, its forward, and packed against padded.

    The first step runs as in `trainer.train()`, without dropout and, but for the parity check, without a backward; the
    first batch of evaluation runs as in `trainer.evaluate()`.
    No weight changes, no file is written, and no callback runs. The main process prints one table: models and
    attention, data, settings, tokens of the first batch, and the parity check. Each process must call it.

    Args:
        trainer:
            A trainer of this package. It can train afterwards.

    Returns:
        `bool`: Whether packed and padded agree, in the models and in the loss of the trainer. Also `True` if nothing
        was packed or compared: the table says why.

    Raises:
        Exception: Any other error that the training would raise up to that point.

    Example:

    ```python
    from trl_padfix import DPOConfig, DPOTrainer, dry_run

    trainer = DPOTrainer(model, args=DPOConfig("runs/dpo", padding_free=True), train_dataset=pairs)
    if dry_run(trainer):
        trainer.train()
    ```
    """
    if not isinstance(vars(trainer).get("padding"), Padding):
        raise TypeError(
            f"`dry_run` takes a trainer of this package, got `{type(trainer).__name__}`. "
            "`trl_padfix.padding_free_trainer` makes one of any trainer class."
        )
    failed: ParityError | None = None
    counts: PaddingStats | None = None
    before = [copy(stats) for stats in trainer.padding.counts]
    try:
        with (
            saved_state(trainer),  # TRL counts steps of online trainers, and keeps their next micro-batches
            temporarily_set(trainer.callback_handler, callbacks=[_StopsEvaluation()]),
            temporarily_set(trainer.padding, is_dry_run=True),
        ):
            _compute_first_batch(trainer)
            counts = copy(trainer.padding.stats)
            if trainer.eval_dataset is not None and trainer.args.eval_strategy != "no":
                with contextlib.suppress(_Stop):
                    trainer.evaluate()
    except ParityError as error:
        failed = error
    counts = (counts or trainer.padding.stats) - (before or [PaddingStats()])[0]
    for stats, earlier in zip(trainer.padding.counts, before, strict=False):  # a training after it counts its own
        vars(stats).update(vars(earlier))
    if trainer.accelerator.is_main_process:
        print(_table(_models(trainer) | _data(trainer) | _settings(trainer) | _findings(trainer, counts, failed)))
    return failed is None and trainer.padding.why_padded is None and trainer.padding.why_eval_padded is None


def _compute_first_batch(trainer: PaddingFreeTrainer) -> None:
    """The first forward of a training."""
    if trainer.padding.settings.changed:
        observe_user_step(trainer)
    step = trainer.training_step

    def stop(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        raise _Stop

    vars(stop)["is_observed"] = True  # `step` is: its comparison ends before the stop
    backward = trainer.accelerator.backward
    with (
        # The backward of the step is left out; only those of the parity check run.
        temporarily_set(trainer.accelerator, backward=lambda *x, **y: context().stats and backward(*x, **y)),
        temporarily_set(trainer.args, eval_on_start=False),
        temporarily_set(trainer, training_step=stop),
        contextlib.suppress(_Stop),
    ):
        trainer.train()


def _models(trainer: PaddingFreeTrainer) -> dict[str, str]:
    found = {}
    for role, model in named_models_of(trainer).items():
        pretrained, trained = find_pretrained(model), sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        found[role] = (
            f"{type(pretrained).__name__}, {total:,} parameters, {trained if role == 'model' else 0:,} trained; "
            f"{pretrained.dtype} weights, {pretrained.config._attn_implementation} attention"
        ).replace("torch.", "")
    return found


def _data(trainer: PaddingFreeTrainer) -> dict[str, str]:
    item = trainer.padding.task.item
    sizes = [
        f"{name}: {counted(len(dataset), item)}" if isinstance(dataset, Sized) else f"{name}: a stream"
        for name, dataset in datasets_of(trainer).items()
    ]
    args, processes = trainer.args, trainer.accelerator.num_processes
    factors = {
        item: args.per_device_train_batch_size,
        "micro-batch": args.gradient_accumulation_steps,
        "process": processes,
    }
    product = " x ".join(counted(number, noun) for noun, number in factors.items())
    return {
        "data": "; ".join(sizes),
        "a step": f"{product} = {counted(math.prod(factors.values()), item)}",
    }


def _settings(trainer: PaddingFreeTrainer) -> dict[str, str]:
    """The fields of TRL that matter most, and ours that are not at their defaults."""
    args, settings = trainer.args, trainer.padding.settings
    ours = {n: v for n, v in vars(settings).items() if n in {"padding_free", *settings.changed}}
    without = "num_train_epochs" if args.max_steps > 0 else "max_steps"  # the other one ends the training
    shown = ours | {name: vars(args)[name] for name in TRAINING if name in vars(args) and name != without}
    shown["mixed_precision"] = trainer.accelerator.mixed_precision  # `accelerate launch` may set it over `bf16=False`
    return {name: str(value.value if isinstance(value, Enum) else value) for name, value in shown.items()}


def _findings(trainer: PaddingFreeTrainer, stats: PaddingStats, failed: ParityError | None) -> dict[str, str]:
    """The tokens of the first training batch, and the parity check."""
    tokens = f"{stats.padded_tokens:,} padded, {stats.real_tokens:,} real, {stats.packed_tokens:,} computed"
    found = {"tokens": f"first training batch: {tokens if stats.forwards else 'runs padded'}"}
    for mode, reports in trainer.padding.parity.items():
        for role, report in zip(named_models_of(trainer), reports, strict=False):
            found[f"parity, {mode}, {role}"] = str(report)
    found |= {f"parity, {mode}, loss": outcome for mode, outcome in trainer.padding.loss_parity.items()}
    if failed is not None:
        found["FAILED"] = str(failed)
    elif reason := trainer.padding.why_padded or trainer.padding.why_eval_padded:
        padded = "all steps" if trainer.padding.why_padded else "evaluations"
        found["PADDED"] = f"{padded} would run padded. They have {reason}."
    elif not trainer.padding.parity:
        settings = trainer.padding.settings
        why = "nothing was packed" if settings.parity_check else "`parity_check` is off"
        of_trl = f"TRL's code computes, because {f'{OFF} is' if is_off() else '`padding_free` is not'} set"
        found["parity"] = f"not compared: {why if settings.padding_free else of_trl}"
    return found


def _table(rows: dict[str, str]) -> str:
    """Names at the left, values wrapped at the right."""
    width = max(map(len, rows)) + 2
    wrapped = [
        textwrap.fill(text, 110, initial_indent=f"{name:{width}}", subsequent_indent=" " * width)
        for name, text in rows.items()
    ]
    return "\n".join(["Dry run: the first batch, and no step.", *wrapped])
