"""
Whole rows, for decoders that are more than a stack of layers over tokens.

Some decoders put tokens of their own before every row, or group the tokens of a row into patches: no token stands by
itself in them, and there is nothing to pack. They are given their rows without padding, those of one length together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .layout import Layout
from .rows import RowBlocks, joined


__all__ = ["needs_whole_rows", "over_whole_rows"]


def needs_whole_rows(decoder: nn.Module) -> str:
    """Why a decoder is given whole rows; empty if it is not."""
    prompt_length = getattr(decoder, "prompt_length", 0)
    if prompt_length:
        return f"puts `prompt_length={prompt_length}` tokens of its own before every row"
    if "patch_lengths" in inspect.signature(decoder.forward).parameters:
        return "groups the tokens of a row into patches"
    return ""


def over_whole_rows(forward: Callable, call: dict[str, Any], layout: Layout) -> Any:
    """
    The output of a decoder for the rows of a batch, packed.

    Args:
        forward (`Callable`):
            Its forward.
        call (`dict`):
            Its arguments, padded, by name.
        layout ([`Layout`]):
            Layout of the batch, without prefix sharing.
    """
    rows = RowBlocks.of(layout, by_length=True)
    outputs = []
    for tokens in rows.tokens:
        places = layout.packed_index[tokens]
        given = {k: _of_rows(v, places, layout) for k, v in call.items() if k != "attention_mask"}
        outputs.append(forward(**given))
    return joined(outputs, rows)


def _of_rows(value: Any, places: torch.Tensor, layout: Layout) -> Any:
    if not isinstance(value, torch.Tensor) or tuple(value.shape[:2]) != layout.batch_shape:
        return value
    return value.flatten(0, 1)[places]
