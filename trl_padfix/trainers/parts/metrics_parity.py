"""The check of an evaluation: its metrics, on rows of a batch, with the model's outputs and with zeros at padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import Trainer

from ...core.context import temporarily_set
from ...core.handle import PaddingRemoval
from ...core.parity.limits import Limits, lowest_dtype
from ..checks.user_code import custom_method
from ..distributed import is_sharded, local_metrics_only
from ..messages import say
from .parity_schedule import ParitySchedule
from .saved_state import saved_state
from .step_parity import Filling, without_packing


__all__ = ["MetricsParity"]

logger = get_logger(__name__)

METRICS_READ_PADDING = (
    "metrics that read logits at padding, which are zero in a packed forward: on some rows {}. In `prediction_step` "
    "and `compute_metrics`, mask them by `attention_mask`, or use only labels other than -100"
)

_Batches = Callable[[], list[Any]]


class MetricsParity:
    """
    The check of metrics, from a user's `prediction_step` or `compute_metrics`, on the first batch with padding.

    Attributes:
        why_padded (`str`, *optional*): Why evaluations are computed padded: a metric reads padding.
    """

    def __init__(self, trainer: Any, is_checked: bool):
        self.why_padded: str | None = None
        self._schedule = ParitySchedule(trainer, is_checked, needs_padding=True)

    def compare(
        self, trainer: Any, handles: list[PaddingRemoval], predict: Any, loss_only: bool | None,
        padded: _Batches, rows: _Batches,
    ) -> None:  # fmt: skip
        """
        Compare the metrics of `rows`, batches that are new in each call, if a step is due.

        `predict` is the `prediction_step` of the trainer, and `padded` gives the padded batches of the models.
        """
        own = custom_method(trainer, {"prediction_step"})
        has_metrics = own is not None or (trainer.compute_metrics is not None and not loss_only)
        is_active = has_metrics and self._schedule.is_active and not is_sharded(trainer)
        if not (is_active and self._schedule.is_due(padded())):
            return
        changed, is_told = None, trainer.accelerator.is_local_main_process
        if is_told:
            say("comparing the metrics of this evaluation: computed three more times, on some rows")
        try:
            changed = _metric_of_padding(trainer, handles, predict, loss_only, rows)
            if is_told and changed is None:
                say("parity ok, the metrics of this evaluation: the same with zeros at padding")
        except Exception as error:  # they may need all rows
            logger.warning(f"The metrics were not compared with padded ones: on some rows they raise {error!r}.")
        if not self._schedule.verdict(changed is None, is_zero=False):
            self.why_padded = METRICS_READ_PADDING.format(changed or "of another process")


def _metric_of_padding(
    trainer: Any, handles: list[PaddingRemoval], predict: Any, loss_only: bool | None, rows: _Batches
) -> str | None:
    """
    A metric of the padded model that changes if its outputs at padding are zeros, as those of a packed forward are.

    The loop of transformers evaluates the batches of `rows` three times, with `predict` as `prediction_step`. A
    metric that changes from call to call, such as a time, is left out.

    Returns:
        `str`, *optional*: `"`eval_accuracy` 0.25, with zeros at padding 0.5"`, or `None`.
    """
    loss_only = loss_only or trainer.args.batch_eval_metrics  # such a `compute_metrics` keeps what it has seen

    def metrics(at_padding: Filling | None = None) -> dict[str, Any]:
        with (
            without_packing(handles, at_padding=at_padding),
            saved_state(trainer),
            local_metrics_only(trainer.accelerator),
            temporarily_set(trainer.callback_handler, callbacks=[], eval_dataloader=None),
            temporarily_set(trainer, prediction_step=predict, gather_function=lambda value: value),
        ):
            return Trainer.evaluation_loop(trainer, rows(), "comparison", loss_only).metrics  # type: ignore

    padded, again, zeroed = metrics(), metrics(), metrics(torch.zeros_like)
    limit = Limits.of_step(lowest_dtype(trainer.model)).mean
    for name, value in padded.items():
        if isinstance(value, int | float):
            moved, noise = (abs(value - other.get(name, value)) / max(abs(value), 1) for other in (zeroed, again))
            if moved > limit >= noise:
                return f"`{name}` {value:.6g}, with zeros at padding {zeroed[name]:.6g}"
    return None
