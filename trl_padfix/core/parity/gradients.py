"""
The gradient of a forward at its embeddings, for the parity check.

Between loss and embeddings lies the backward of every layer, attention's among them, so what is wrong in one of them
shows there. It is summed for each token id: the sums of a packed batch are those of the padded one. No parameter takes
part: frozen, quantised and adapted weights make no difference, and nothing is left in `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.sharded import differentiates_in_parts


__all__ = ["differing", "gradient_tolerance", "obstacle_to_gradients", "with_gradient"]

LARGEST = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative difference of a gradient, by dtype; float32 on CPU comes out near 1e-6."""

TIMES_ROUNDING = 3
"""How many times the difference of two padded forwards, or gradients, that of packed and padded may be, if half."""


def obstacle_to_gradients(model: nn.Module) -> str | None:
    """Why no gradient can be taken of a model beside those of its training; `None` if one can."""
    if torch.is_inference_mode_enabled():
        return "torch is in inference mode"
    if differentiates_in_parts(model):
        return "FSDP or DeepSpeed has the backward pass in hand; `trl-padfix parity` compares them in one process"
    return None


def with_gradient(
    model: PreTrainedModel, ids: torch.Tensor, score: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What `score`, a forward of `model`, returns, and the gradient of its sum at the embedding of each of the distinct
    `ids` that are embedded, `(ids, H)`; a `RuntimeError` if the forward cannot be differentiated.
    """
    embedded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        leaf = output.detach().requires_grad_()
        embedded.append((next(iter((*args, *kwargs.values()))), leaf))
        return leaf.clone()  # some models write into it

    hook = model.get_input_embeddings().register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.enable_grad():
            scores = score()
            gradients = torch.autograd.grad(scores.sum(), [leaf for _, leaf in embedded])
    finally:
        hook.remove()
    known = ids.unique()
    total = known.new_zeros(len(known), gradients[0].shape[-1], dtype=torch.promote_types(scores.dtype, torch.float32))
    for (own, _), gradient in zip(embedded, gradients, strict=True):
        places = torch.searchsorted(known, own.flatten()).clamp(max=len(known) - 1)
        total.index_add_(0, places, gradient.flatten(0, -2).to(total.dtype))
    return scores.detach(), total


def differing(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference of a gradient from another one."""
    return ((gradient - other).norm() / other.norm().clamp(min=torch.finfo(other.dtype).tiny)).item()


def gradient_tolerance(dtype: torch.dtype, rounding: float) -> float:
    """Largest relative difference in a precision in which two padded gradients differ by `rounding`."""
    return LARGEST.get(dtype) or max(TIMES_ROUNDING * rounding, 4 * torch.finfo(dtype).eps)
