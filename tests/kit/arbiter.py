"""
The arbiter: each row by itself, unpadded, without neighbors and without sharing, in float64.

Padded, packed, shared, budgeted and split computations are compared with it, so a test says which of them is wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from zoo.model_numbers import gradients

from conformance.arbiter import in_precision


class Alone(NamedTuple):
    """What a model computes of each row alone."""

    logits: list[torch.Tensor]
    """Logits of the real tokens of each row, `(n, V)`."""
    gradients: dict[str, torch.Tensor]
    """Gradients of the sum of [`weighted_loss`] of all rows."""


def weighted_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The sum of negative log-probabilities of the next tokens, in which no two positions of a row count the same."""
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return -(logps * torch.linspace(0.5, 1.5, logps.shape[1] + 1, dtype=logps.dtype)[1:]).sum()


def alone(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Alone:
    """Compute each row of a padded batch alone, in float64: what any mask keeps of it. The model is copied."""
    exact = in_precision(model)
    exact.zero_grad()
    logits = []
    for row, real in zip(ids, mask.bool(), strict=True):
        first, last = real.nonzero()[[0, -1], 0]
        row, real = row[first : last + 1], real[first : last + 1]  # holes inside of a row are a part of it
        holes = {} if real.all() else {"attention_mask": real.long().unsqueeze(0)}
        output = exact(input_ids=row.unsqueeze(0), use_cache=False, **holes).logits[:, real]
        weighted_loss(output, row[real].unsqueeze(0)).backward()
        logits.append(output[0].detach())
    return Alone(logits, gradients(exact))


def batched(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> Alone:
    """The same of one forward of the batch as it is, in the model's own precision: padded, packed or shared."""
    model.zero_grad()
    output = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    rows = [(output[i, keep], ids[i, keep]) for i, keep in enumerate(mask.bool())]
    torch.stack([weighted_loss(logits[None], row[None]) for logits, row in rows]).sum().backward()
    return Alone([logits.detach() for logits, _ in rows], gradients(model))
