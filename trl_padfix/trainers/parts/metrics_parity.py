"""The check of an evaluation: its metrics, on a few short rows of a batch, with the model's outputs and with zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer

from ...core.context import temporarily_set
from ...core.parity.limits import Limits, lowest_dtype
from ..distributed import local_metrics_only
from .part import PaddingFreeTrainer
from .saved_state import saved_state
from .step_parity import few_items, without_packing


__all__ = ["metric_of_padding"]


def metric_of_padding(
    trainer: PaddingFreeTrainer, predict: Callable[..., Any], inputs: Any, loss_only: bool | None
) -> str | None:
    """
    A metric of the padded model that changes if its outputs at padding are zeros, as those of a packed forward are.

    The loop of transformers evaluates a few rows of `inputs` three times, with `predict` as `prediction_step`. A
    metric that changes from call to call, such as a time, is left out.

    Returns:
        `str`, *optional*: `"`eval_accuracy` 0.25, with zeros at padding 0.5"`, or `None`.
    """
    loss_only = loss_only or trainer.args.batch_eval_metrics  # such a `compute_metrics` keeps what it has seen

    def metrics(zeros: bool) -> dict[str, Any]:
        # No rows if the batch cannot be cut. Of its type, and new each time: a step may take entries out of its batch.
        of_type = dict if isinstance(inputs, dict) else type(inputs)
        rows = [*map(of_type, few_items(trainer, inputs)[0][:1])]
        with (
            without_packing(trainer.padding.handles, zeros=zeros),
            saved_state(trainer),
            local_metrics_only(trainer.accelerator),
            temporarily_set(trainer.padding, running=None, in_steps=(), why_padded=None),
            temporarily_set(trainer.callback_handler, callbacks=[], eval_dataloader=None),
            temporarily_set(trainer, prediction_step=predict, gather_function=lambda value: value),
        ):
            return Trainer.evaluation_loop(trainer, rows, "comparison", loss_only).metrics  # type: ignore

    padded, again, zeroed = map(metrics, (False, False, True))
    limit = Limits.of_step(lowest_dtype(trainer.model)).mean
    for name, value in padded.items():
        if isinstance(value, int | float):
            moved, noise = (abs(value - other.get(name, value)) / max(abs(value), 1) for other in (zeroed, again))
            if moved > limit >= noise:
                return f"`{name}` {value:.6g}, with zeros at padding {zeroed[name]:.6g}"
    return None
