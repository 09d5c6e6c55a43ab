"""The claim about a custom loss (`loss_reduction`): weights of its micro-batches, and its check on the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..temporary_attributes import temporarily_set
from .micro_batches import MicroBatch


__all__ = ["claimed_weights", "differs", "loss_and_norm", "without_dropout"]


def claimed_weights(
    reduction: str, micro_batches: Sequence[MicroBatch], num_label_tokens: Callable[..., Any]
) -> list[Any]:
    """
    Weights of micro-batches in the loss of a step that has this reduction: `"rows"`, `"tokens"` or `"sum"`.

    `num_label_tokens` returns the number of label tokens of a batch.
    """
    if reduction == "rows":
        return [m.weight for m in micro_batches]
    if reduction == "sum":
        return [float(m.weight > 0) for m in micro_batches]
    counts = [num_label_tokens(m.batch) * (m.weight > 0) for m in micro_batches]
    return [count / sum(counts).clamp(min=1) for count in counts]


def loss_and_norm(
    losses: Iterable[Callable[[], torch.Tensor]], parameters: Sequence[nn.Parameter]
) -> tuple[float, float]:
    """
    The sum of losses, and the norm of its gradient.

    The losses are computed one after another, and each is freed with its graph. `grad` of the parameters stays as it
    is, so hooks that run after its accumulation (DDP's) do not run.
    """
    total, gradients = 0.0, [None] * len(parameters)
    for compute in losses:
        loss = compute()
        total += float(loss.detach())
        if parameters:
            new = torch.autograd.grad(loss, parameters, allow_unused=True)
            # `None` stands for a parameter that no loss has used so far.
            gradients = [b if a is None else a if b is None else a + b for a, b in zip(gradients, new, strict=True)]
    norms = [gradient.float().norm() for gradient in gradients if gradient is not None]
    return total, float(torch.stack(norms).norm()) if norms else 0.0


def differs(whole: tuple[float, float], split: tuple[float, float], dtype: torch.dtype) -> bool:
    """Whether losses or gradient norms differ by more than rounding."""
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    return any(abs(a - b) > tolerance * max(abs(a), 1e-3) for a, b in zip(whole, split, strict=True))


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """A block in which dropout layers and the dropout of attention are off: two forwards can be compared."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                stack.enter_context(temporarily_set(module, "training", False))
            if isinstance(getattr(module, "attention_dropout", None), float):
                stack.enter_context(temporarily_set(module, "attention_dropout", 0.0))
        yield
