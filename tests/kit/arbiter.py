"""
The arbiter: each row by itself, unpadded, without neighbours and without sharing, in float64.

Padded, packed, shared, budgeted and split computations are compared with it, so a test says which of them is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from conformance.arbiter import in_precision


class Alone(NamedTuple):
    """What a model computes of each row alone."""

    logits: list[torch.Tensor]
    """Logits of the real tokens of each row, `(n, V)` in float64."""

    gradients: dict[str, torch.Tensor]
    """Gradients of the sum of the losses of all rows, in float64."""

    losses: torch.Tensor
    """The loss of each row, `(B,)`."""


def real_rows(*tensors: torch.Tensor, mask: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The real tokens of each row of `(B, L, ...)` tensors, `(1, n, ...)` each."""
    for i, keep in enumerate(mask.bool()):
        yield tuple(t[i, keep].unsqueeze(0) for t in tensors)


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The sum of negative log-probabilities of the next tokens, in which no two positions of a row count the same."""
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return -(logps * torch.linspace(0.5, 1.5, logps.shape[1] + 1, dtype=logps.dtype)[1:]).sum()


def alone(
    model: torch.nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weighted_loss,
    **kwargs: Any,
) -> Alone:
    """
    Compute each row of a padded batch alone.

    Args:
        model (`torch.nn.Module`):
            A causal language model, on which nothing is attached. It is copied.
        ids, mask (`torch.Tensor` of shape `(B, L)`):
            Token ids, and any mask of zeros and ones: rows are what it keeps.
        loss (`Callable`):
            The loss of a row, from its logits `(1, n, V)` and ids `(1, n)`.
        **kwargs:
            More arguments of the model.
    """
    exact = in_precision(model)
    exact.zero_grad()
    logits, losses = [], []
    for row, real in zip(ids, mask.bool(), strict=True):
        first, last = real.nonzero()[[0, -1], 0]
        row, real = row[first : last + 1], real[first : last + 1]  # holes inside of a row are a part of it
        holes = {} if real.all() else {"attention_mask": real.long().unsqueeze(0)}
        output = exact(input_ids=row.unsqueeze(0), use_cache=False, **holes, **kwargs).logits[:, real]
        row = row[real].unsqueeze(0)
        value = loss(output, row)
        value.backward()
        logits.append(output[0].detach())
        losses.append(value.detach())
    gradients = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    return Alone(logits, gradients, torch.stack(losses))


def batched(
    model: torch.nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weighted_loss,
    **kwargs: Any,
) -> Alone:
    """The same of one forward of the batch as it is, in the model's own precision: padded, packed or shared."""
    model.zero_grad()
    output = model(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs).logits
    rows = [*real_rows(output, ids, mask=mask)]
    losses = torch.stack([loss(*row) for row in rows])
    losses.sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Alone([row[0][0].detach() for row in rows], gradients, losses.detach())
