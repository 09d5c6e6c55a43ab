"""
The scores that are compared between packed and padded, and their gradient with respect to the embeddings.

Scores are log-probabilities, or outputs of a pooling head. The gradient passes the backward of every layer, so an
error in any of them changes it. It is summed for each token id: the sums of a packed batch equal the sums of the
padded one. No gradient of a parameter is computed: frozen, quantized and adapted weights make no difference, and
`.grad` stays unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy import by_name, differentiates_in_parts


__all__ = [
    "gradient_obstacle", "logits_of", "logits_of_packed", "relative_difference", "scores_of", "select_columns",
    "with_gradient",
]  # fmt: skip

MAX_COLUMNS = 64
"""Compared columns of a batch with images, or of a long row: logits of all columns would take too much memory."""


def logits_of_packed(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits `(B, L, V)` of a padded batch that the model receives as one packed row, as from a user who packs."""
    keep = mask.bool()
    positions = (mask.cumsum(1) - 1)[keep][None]
    logits = logits_of(by_name(model)(input_ids=ids[keep][None], position_ids=positions, use_cache=False))
    padded = logits.new_zeros(*ids.shape, logits.shape[-1])
    padded[keep] = logits[0]
    return padded


def logits_of(output: Any) -> torch.Tensor:
    """A model's logits, or a pipeline's embeddings of rows; without both the largest tensor, such as hidden states."""
    if isinstance(output, torch.Tensor):
        return output
    values = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "logits") else None
    for name in ("logits", "sentence_embedding"):
        if values is not None and isinstance(values.get(name), torch.Tensor):
            return values[name]
    # Not the loss, which is one number: a difference in one token hardly shows in it.
    tensors = [x for x in (output if values is None else values.values()) if isinstance(x, torch.Tensor)]
    return max((x for x in tensors if x.is_floating_point()), key=torch.Tensor.numel)


def select_columns(inputs: dict[str, Any], model: PreTrainedModel) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of a call for the logits of at most `MAX_COLUMNS` columns, and these columns, `(n,)`."""
    columns = torch.arange(inputs["input_ids"].shape[1] - 1, device=inputs["input_ids"].device)
    columns = columns[:: max(1, -(-len(columns) // MAX_COLUMNS))]
    # ms-swift makes reward models with an identity as head, and pools the states of all columns afterwards.
    has_head = not isinstance(model.get_output_embeddings(), nn.Identity)
    takes_columns = "logits_to_keep" in inspect.signature(model.forward).parameters and has_head
    return {**inputs, "use_cache": False} | ({"logits_to_keep": columns} if takes_columns else {}), columns


def scores_of(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `(n,)` of the real tokens after `columns`, or the values of a head for tokens or rows."""
    if logits.dim() == 3 and len(logits) == len(ids) and logits.shape[1] > ids.shape[1]:
        logits = logits[:, -ids.shape[1] :]  # prompt tuning prepends virtual tokens to every row
    if logits.dim() == 3 and logits.shape[:2] == ids.shape:
        logits = logits[:, columns]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.dim() == 2 or logits.shape[:2] != (len(ids), len(columns)):
        return logits.flatten()
    if logits.shape[-1] == 1:  # a value for each token, whose log-probability would be 0
        return logits[..., 0][mask[:, columns].bool()]
    # A masked token has no score, and neither has the token after it.
    real = (mask[:, columns] * mask[:, columns + 1]).bool()
    ids = ids[:, columns + 1].clamp(max=logits.shape[-1] - 1)  # ids of image tokens may be larger than the vocabulary
    return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)[real]


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
