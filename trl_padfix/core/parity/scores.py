"""The scores that are compared between packed and padded: log-probabilities, or outputs of a pooling head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.pipelines import by_name


__all__ = ["logits_of", "logits_of_packed", "scores_of", "select_columns"]

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
