"""
Positions of packed tokens, for decoders that number their tokens themselves.

Most decoders take `position_ids`. Two kinds do not, or take them in another numbering: those whose positional
embedding counts the columns of the batch (BART and its kin), and those that count the tokens that are not padding,
from `padding_idx + 1` on (RoBERTa and its kin).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from .layout import Layout, pack


__all__ = ["numbering", "packed_positions", "position_embeddings", "takes_positions"]


def takes_positions(decoder: nn.Module) -> bool:
    """Whether the forward of a decoder is given the positions of its tokens."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


def position_embeddings(decoder: nn.Module) -> list[nn.Embedding]:
    """The embeddings that a decoder without `position_ids` hands the positions of its columns to."""
    if takes_positions(decoder):
        return []
    tables = [module for module in decoder.children() if isinstance(module, nn.Embedding)]
    return [table for table in tables if "position_ids" in inspect.signature(table.forward).parameters]


def numbering(decoder: nn.Module) -> nn.Module | None:
    """The module that numbers the tokens of a batch by their ids, if the decoder has one."""
    return next((m for m in decoder.modules() if hasattr(m, "create_position_ids_from_input_ids")), None)


def packed_positions(numbers: Any, call: dict[str, Any], layout: Layout) -> torch.Tensor:
    """
    Positions of the packed tokens where the caller gave none.

    Args:
        numbers (`torch.nn.Module`, *optional*):
            What [`numbering`] found in the decoder.
        call (`dict`):
            Arguments of the decoder, padded.
        layout ([`Layout`]):
            Layout of the batch.

    Returns:
        `torch.Tensor` of shape `(T,)`: those of each row computed alone.
    """
    if numbers is None:
        return layout.positions
    ids, mask = call.get("input_ids"), call.get("attention_mask")
    padding_idx: int = numbers.padding_idx
    if ids is None:
        return layout.positions + padding_idx + 1
    if mask is not None:  # what stands before a row is padding to the numbering too, whatever its id
        ids = ids.masked_fill(mask.cumsum(1) == 0, padding_idx)
    return pack(numbers.create_position_ids_from_input_ids(ids, padding_idx), layout)[0]
