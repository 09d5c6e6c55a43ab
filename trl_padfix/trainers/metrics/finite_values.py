"""Weights, losses and gradients that are NaN or infinite: refused before the first step, reported after it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accelerate.logging import get_logger
from torch import nn

from ..checks import tokenizer_of
from ..data.row_checks import worth_a_warning
from ..parts import Part, Step


__all__ = ["FiniteValues", "check_weights"]

logger = get_logger(__name__)

Batch = dict[str, torch.Tensor]

PENDING = 64
"""Most values whose finiteness is not looked at yet: looking waits for the device, so it is done when TRL logs."""

SHOWN_ROWS, SHOWN_TOKENS = 4, 12


def check_weights(model: nn.Module, which: str) -> None:
    """Raise a `ValueError` if a weight is NaN or infinite; quantized ones, and other processes', are not looked at."""
    broken = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not parameter.is_meta and not bool(parameter.detach().isfinite().all())
    ]
    if broken:
        name, parameter = broken[0]
        count = parameter.numel() - int(parameter.detach().isfinite().sum())
        others = f", and so are values of {len(broken) - 1} other weights" if len(broken) > 1 else ""
        raise ValueError(
            f"{count} of {parameter.numel()} values of `{name}` of the {which} are NaN or infinite{others}: every "
            "loss would be NaN, which is logged as 0.0. Load the weights in a dtype that can hold them (bfloat16 or "
            "float32), or go back to a checkpoint from before they broke."
        )


class Seen(NamedTuple):
    """A loss or the norm of a gradient, and the rows that it was computed on."""

    what: str
    step: int
    value: torch.Tensor | float
    batches: list[Batch]


class FiniteValues(Part):
    """
    Reports losses and gradients that are not finite.

    With `stop_on_nonfinite` each is looked at before the optimizer's step. By default they are looked at when TRL
    logs, so that a step does not wait for the device.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._seen: list[Seen] = []
        self._step_batches: list[Batch] = []
        self._count = 0

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        yield
        if not isinstance(step.loss, torch.Tensor):
            return
        if step.mode == "train":
            self._step_batches = [*self._step_batches[-PENDING:], *step.batches]
        what = "loss of training" if step.mode == "train" else "loss of evaluation"
        self._see(Seen(what, step.number, step.loss.detach(), step.batches))

    def see_gradient(self, norm: torch.Tensor | float | None, number: int) -> None:
        """Remember the norm of the gradient of an optimizer step."""
        batches, self._step_batches = self._step_batches, []
        if norm is not None:
            self._see(Seen("norm of the gradient", number, norm, batches))

    def _see(self, seen: Seen) -> None:
        self._seen.append(seen)
        if self.settings.stop_on_nonfinite or len(self._seen) >= PENDING:
            self.look()

    def log(self, logs: dict[str, float], mode: str) -> None:
        self.look()

    def look(self) -> None:
        """Look at the values that were not looked at yet; a `FloatingPointError` with `stop_on_nonfinite`."""
        seen, self._seen = self._seen, []
        for what, step, value, batches in seen:
            if bool(value.isfinite()) if isinstance(value, torch.Tensor) else math.isfinite(value):
                continue
            self._count += 1
            text = (
                f"The {what} in step {step} is {float(value)}{self._rows_of(batches)}. Look for rows that are broken, "
                "a learning rate that is too high, and float16 where bfloat16 is needed."
            )
            if self.settings.stop_on_nonfinite:
                raise FloatingPointError(
                    f"{text} The run stops before the weights are changed by it, as `stop_on_nonfinite=True` asks."
                )
            if worth_a_warning(self._count):
                so_far = f" So far {self._count} losses and gradients were not finite." if self._count > 1 else ""
                logger.warning(
                    f"{text}{so_far} The run goes on, as TRL's does (which logs such a loss as the mean of the losses "
                    "before it); `stop_on_nonfinite=True` stops it.",
                    main_process_only=False,
                )

    def _rows_of(self, batches: list[Batch]) -> str:
        """The first rows of batches, by the beginning of their texts."""
        tokenizer = tokenizer_of(self.trainer.processing_class)
        shown, count = [], 0
        for batch in batches:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            count += len(ids)
            for i in range(min(len(ids), SHOWN_ROWS - len(shown))):
                row = ids[i] if mask is None else ids[i][mask[i].bool()]
                first = row[:SHOWN_TOKENS]
                shown.append(repr(first.tolist() if tokenizer is None else tokenizer.decode(first)))
        if not shown:
            return ""
        more = f" and {count - len(shown)} more" if count > len(shown) else ""
        return f", over the rows that begin with {', '.join(shown)}{more}"
