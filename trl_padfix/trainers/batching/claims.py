"""The claim about a custom loss (`loss_reduction`): weights of its micro-batches, and its check on the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


__all__ = ["claimed_weights", "differs", "loss_and_norm", "without_dropout"]


def claimed_weights(
    reduction: str, batches: Sequence[dict[str, Any]], weights: Sequence[float], num_label_tokens: Callable[..., Any]
) -> list[Any]:
    """
    Weights of micro-batches in the loss of a step that has this reduction.

    Args:
        reduction (`str`):
            `"rows"`, `"tokens"` or `"sum"`.
        batches (`Sequence[dict]`):
            The micro-batches.
        weights (`Sequence[float]`):
            Their shares of the rows; 0 for those that only match the forwards of other processes.
        num_label_tokens (`Callable`):
            Returns the number of label tokens of a batch.
    """
    if reduction == "rows":
        return list(weights)
    if reduction == "sum":
        return [float(weight > 0) for weight in weights]
    counts = [num_label_tokens(batch) * (weight > 0) for batch, weight in zip(batches, weights, strict=True)]
    return [count / sum(counts).clamp(min=1) for count in counts]


def loss_and_norm(losses: Iterator[torch.Tensor], parameters: Sequence[nn.Parameter]) -> tuple[float, float]:
    """
    The sum of losses, and the norm of its gradient. The losses are computed one after another, each freed with its
    graph. Gradients of parameters stay as they are, and so do hooks on them: nothing is accumulated.
    """
    total, gradients = 0.0, [None] * len(parameters)
    for loss in losses:
        total += float(loss.detach())
        if parameters:
            new = torch.autograd.grad(loss, parameters, allow_unused=True)
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
    layers = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    rates = [
        (m, m.attention_dropout) for m in model.modules() if isinstance(getattr(m, "attention_dropout", None), float)
    ]
    for layer in layers:
        layer.eval()
    for module, _ in rates:
        module.attention_dropout = 0.0
    try:
        yield
    finally:
        for layer in layers:
            layer.train()
        for module, rate in rates:
            module.attention_dropout = rate
