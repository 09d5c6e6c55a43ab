"""Finds NaN and infinite values: in losses and gradients."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate.logging import get_logger

from ..data.data_warnings import worth_a_warning
from ..data.tokenizers import tokenizer_of
from ..parts import Part, Step


if TYPE_CHECKING:
    from ..parts import PaddingFreeTrainer


__all__ = ["FiniteValues"]

logger = get_logger(__name__)

Batch = dict[str, torch.Tensor]

MAX_PENDING_VALUES = 64
"""Maximum number of values that are not checked yet. A check waits for the device, so it is postponed to TRL's log."""

SHOWN_ROWS, SHOWN_TOKENS = 4, 12
"""Rows of a warning, and tokens of each."""


class PendingValue(NamedTuple):
    """A loss or gradient norm that is not checked yet, and the batches that it was computed on."""

    name: str
    step: int
    value: torch.Tensor | float
    batches: list[Batch]


class FiniteValues(Part):
    """
    Reports losses and gradients that are not finite.

    With `stop_on_nonfinite` each value is checked before the optimizer's step. By default values are checked when TRL
    logs, so that a step does not wait for the device.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._pending: list[PendingValue] = []
        self._step_batches: list[Batch] = []
        self._count = 0

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        yield
        if not isinstance(step.loss, torch.Tensor):
            return
        if step.mode == "train":
            # Batches of the micro-batches so far, for the gradient norm. Limited, because nothing clears them if
            # Trainer never computes that norm.
            self._step_batches = [*self._step_batches[-MAX_PENDING_VALUES:], *step.batches]
        name = "loss of training" if step.mode == "train" else "loss of evaluation"
        self._record(PendingValue(name, step.number, step.loss.detach(), step.batches))

    def record_grad_norm(self, norm: torch.Tensor | float | None, number: int) -> None:
        """Record the gradient norm of the optimizer step `number`, to be checked."""
        batches, self._step_batches = self._step_batches, []
        if norm is not None:
            self._record(PendingValue("norm of the gradient", number, norm, batches))

    def _record(self, value: PendingValue) -> None:
        self._pending.append(value)
        if self.settings.stop_on_nonfinite or len(self._pending) >= MAX_PENDING_VALUES:
            self.check_pending()

    def log(self, logs: dict[str, float], mode: str) -> None:
        self.check_pending()

    def check_pending(self) -> None:
        """
        Check the pending values, which waits for the device.

        Raises:
            FloatingPointError: If a value is not finite, with `stop_on_nonfinite`.
        """
        pending, self._pending = self._pending, []
        for name, step, value, batches in pending:
            if bool(value.isfinite()) if isinstance(value, torch.Tensor) else math.isfinite(value):
                continue
            self._count += 1
            text = (
                f"The {name} in step {step} is {float(value)}{self._rows_of(batches)}. Look for broken rows, a "
                "learning rate that is too high, and float16 where bfloat16 is needed."
            )
            if self.settings.stop_on_nonfinite:
                raise FloatingPointError(
                    f"{text} The run stops before this changes the weights, because of `stop_on_nonfinite=True`."
                )
            if worth_a_warning(self._count):
                so_far = f" So far {self._count} losses and gradients were not finite." if self._count > 1 else ""
                logger.warning(
                    f"{text}{so_far} The run goes on, as in TRL (whose log shows the mean of earlier losses instead); "
                    "`stop_on_nonfinite=True` stops it.",
                    main_process_only=False,  # rows differ between processes
                )

    def _rows_of(self, batches: list[Batch]) -> str:
        """The first rows of batches, by number and length, as the end of a sentence; empty without batches."""
        shown, count = [], 0
        for batch in batches:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            for i in range(min(len(ids), SHOWN_ROWS - len(shown))):
                row = ids[i] if mask is None else ids[i][mask[i].bool()]
                shown.append(f"{count + i} ({len(row)} tokens{self._text_of(row)})")
            count += len(ids)
        if not shown:
            return ""
        more = f" and {count - len(shown)} more" if count > len(shown) else ""
        hint = "" if self._shows_text() else "; their text is logged at the level DEBUG of `trl_padfix` alone"
        return f", over the rows {', '.join(shown)}{more} of the step{hint}"

    def _shows_text(self) -> bool:
        return logger.isEnabledFor(logging.DEBUG)

    def _text_of(self, row: torch.Tensor) -> str:
        """The beginning of a row, if it is asked for: logs travel further than training data should."""
        if not self._shows_text():
            return ""
        tokenizer, first = tokenizer_of(self.trainer.processing_class), row[:SHOWN_TOKENS]
        return f": {first.tolist() if tokenizer is None else tokenizer.decode(first)!r}"
