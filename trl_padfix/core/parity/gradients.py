"""
The gradient of a forward with respect to its embeddings, for the parity check.

This gradient passes the backward of every layer, so an error in any of them changes it. It is summed for each token
id: the sums of a packed batch equal the sums of the padded one. No gradient of a parameter is computed: frozen,
quantized and adapted weights make no difference, and `.grad` stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.sharded import differentiates_in_parts


__all__ = ["gradient_obstacle", "relative_difference", "with_gradient"]


def gradient_obstacle(model: nn.Module) -> str | None:
    """Why no gradient can be computed outside of a model's training step; `None` if one can."""
    if torch.is_inference_mode_enabled():
        return "torch is in inference mode"
    if differentiates_in_parts(model):
        return "FSDP or DeepSpeed hooks into the backward pass"
    return None


def with_gradient(
    model: PreTrainedModel, ids: torch.Tensor, score: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Run `score`, a forward of `model`, and differentiate the sum of its result.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the result, and the gradient with respect to the embedding of each
        distinct id of `ids`, `(distinct ids, H)`, sorted by id.

    Raises:
        RuntimeError: If the forward cannot be differentiated.
    """
    embedded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        leaf = output.detach().requires_grad_()  # cut off from the weights: these need no gradient
        embedded_ids = next(iter((*args, *kwargs.values())))  # the first argument, by position or by name
        embedded.append((embedded_ids, leaf))
        return leaf.clone()  # some models write into their embeddings, which torch forbids for a leaf

    with model.get_input_embeddings().register_forward_hook(keep, with_kwargs=True), torch.enable_grad():
        scores = score()
        # A dry run of the decoder calls its embedding too, and its output is not used.
        gradients = torch.autograd.grad(
            scores.sum(), [leaf for _, leaf in embedded], allow_unused=True, materialize_grads=True
        )
    distinct = ids.unique()  # sorted
    dtype = torch.promote_types(scores.dtype, torch.float32)
    total = distinct.new_zeros(len(distinct), gradients[0].shape[-1], dtype=dtype)
    for (embedded_ids, _), gradient in zip(embedded, gradients, strict=True):
        # `clamp`: the insertion point of an id above all others, such as an image token's, is beyond the end.
        index = torch.searchsorted(distinct, embedded_ids.flatten()).clamp(max=len(distinct) - 1)
        total.index_add_(0, index, gradient.flatten(0, -2).to(total.dtype))
    return scores.detach(), total


def relative_difference(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """Relative difference `|gradient - other| / |other|`."""
    return ((gradient - other).norm() / other.norm().clamp(min=torch.finfo(other.dtype).tiny)).item()
