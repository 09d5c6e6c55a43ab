"""
The patches on positions.

Within a packed forward [`PositionPatch`] gives positions to decoders that take none, and [`RopePatch`] gives rotary
embeddings the length of the padded batch. [`NumberingPatch`] counts the positions of padded forwards.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call.calls import call_of, rows_call
from ..model.older import has_cache
from ..model.patching import ForwardPatch


__all__ = ["NumberingPatch", "PositionPatch", "RopePatch"]


class PositionPatch(ForwardPatch):
    """Gives a positional embedding the positions of the packed tokens in their rows, not those in the packed row."""

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        if (call := call_of(self, {})) is None:
            return self.wrapped(*args, **kwargs)
        arguments, positions = self.bind(args, kwargs), call.layout.positions
        column = arguments.get("position_ids")  # some decoders pass columns (BioGPT)
        arguments["position_ids"] = positions if column is None else positions.view_as(column)
        return self.wrapped(**arguments)


class RopePatch(ForwardPatch):
    """
    Gives a rotary embedding the length of the padded batch.

    With dynamic and long RoPE the frequencies depend on the largest position of a forward, padding included. The patch
    appends this position to `position_ids`, so that the embedding picks the frequencies of the padded forward, and
    drops the appended token from the output.
    """

    serves_recomputation = True

    def call(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, {}) or rows_call(self.attachment.decoder)
        arguments = self.bind(args, kwargs) if call is not None else {}
        positions = arguments.get("position_ids")
        if call is None or positions is None:
            return self.wrapped(*args, **kwargs)
        last = torch.as_tensor(call.last_position, dtype=positions.dtype, device=positions.device)
        arguments["position_ids"] = torch.cat([positions, last.expand(*positions.shape[:-1], 1)], dim=-1)
        output = self.wrapped(**arguments)
        return output[..., :-1, :] if isinstance(output, torch.Tensor) else tuple(x[..., :-1, :] for x in output)


class NumberingPatch(ForwardPatch):
    """Counts positions in each padded row from the first real token, if the caller passes none."""

    @torch.compiler.disable(recursive=False)  # the decoder beneath computes a padded batch, which can be compiled
    def _untraced(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def packed(self, *args: Any, **kwargs: Any) -> Any:
        call = self.bind(args, kwargs)
        mask: Any = call.get("attention_mask")
        has_mask = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if not has_mask or has_cache(call) or call.get("position_ids") is not None:
            return self.wrapped(*args, **kwargs)
        column = torch.arange(mask.shape[1], device=mask.device)
        # `argmax` gives the first of several maxima: the first real column. Padding before it would be negative.
        call["position_ids"] = (column - mask.long().argmax(1, keepdim=True)).clamp(min=0)
        return self.wrapped(**call)
