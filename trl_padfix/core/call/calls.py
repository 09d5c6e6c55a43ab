"""
The calls of a model and of its decoder: what their parts have to tell each other.

A [`ModelCall`] is one call of an attached model, a [`PackedCall`] one packed forward of its decoder. A [`PackedCall`]
also travels in the keyword arguments of the layers, where gradient checkpointing keeps it for the recomputation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..context import context
from ..layout.layout import Layout
from ..layout.slices import Slices
from .prepared_masks import PreparedMasks


__all__ = ["LAYOUT", "ModelCall", "PackedCall", "RowsCall", "model_call", "packed_call", "rows_call"]

LAYOUT = "padding_layout"
"""Keyword under which a [`PackedCall`] travels from the decoder through its layers to the attention function."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """
    One call of an attached model, from its head to its decoder and back.

    Attributes:
        decoder (`torch.nn.Module`):
            The decoder of the model that was called.
        arguments (`dict`):
            What the module around the decoder was called with, if there is one: ids and mask of a multimodal model.
        scored (`torch.Tensor` of shape `(n,)`, *optional*):
            Places in the flattened batch whose hidden states the LM head asks for; the decoder returns no others.
        given (`dict`):
            Mask, positions and bounds that the model was called with: some do not hand them to their decoder.
        pools_last (`bool`):
            Whether the decoder returns the state of a row's last real token in every column of the row.
        layout ([`Layout`], *optional*):
            The layout of the `(B, L, H)` that the decoder has returned, for what comes after it in this call.
        doubled (`list` of `weakref.ref`):
            What towers answered whose halves are the same; not kept alive for it.
    """

    decoder: nn.Module
    arguments: dict[str, Any] = field(default_factory=dict)
    scored: torch.Tensor | None = None
    given: dict[str, Any] = field(default_factory=dict)
    pools_last: bool = False
    layout: Layout | None = None
    doubled: list[weakref.ref[torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class PackedCall:
    """
    One packed forward: what its layers need to know.

    It lives as long as the forward can still be recomputed: gradient checkpointing keeps it until backward is done.

    Attributes:
        layout ([`Layout`]): Layout of the batch.
        implementation (`str`): Attention implementation to compute with.
        decoder (`torch.nn.Module`): The decoder that is called.
        position_ids (`torch.Tensor`): Positions of the packed tokens, as the decoder is given them.
        last_position (`int` or `torch.Tensor`, *optional*): Largest position of the padded call, padding included.
        dry_run (`Callable`): Tells how the decoder calls its layers for rows, where some need rows.
        prepared ([`PreparedMasks`], *optional*): Masks that the decoder was given, where its own would not do.
        one_block (`bool`): Whether the rows of all mixers are one block, so that every process runs a mixer once.
        slices ([`Slices`], *optional*): How the packed row is cut, where each process of a group computes a part.
        made (`dict`): What mixers make of the layout when they first need it; see [`PackedCall.once`].
    """

    layout: Layout
    implementation: str
    decoder: nn.Module
    position_ids: torch.Tensor
    last_position: int | torch.Tensor = 0
    dry_run: Callable[..., Any] = lambda rows: []
    prepared: PreparedMasks | None = None
    one_block: bool = False
    slices: Slices | None = None
    made: dict[Any, Any] = field(default_factory=dict)

    @property
    def own_tokens(self) -> int:
        """Packed tokens that this process computes."""
        return self.layout.packed_tokens if self.slices is None else self.slices.tokens[self.slices.group.rank]

    def once(self, key: Any, build: Callable[[], Any]) -> Any:
        """What `build` makes for this forward: made at the first call with `key`, and kept for the recomputation."""
        if key not in self.made:  # two threads of a backward may both build it: it comes out the same
            self.made[key] = build()
        return self.made[key]


@dataclass(frozen=True, eq=False)
class RowsCall:
    """
    A forward of a decoder over whole rows with its layers left out, to see how it calls them; see `dry_run.py`.

    Its fields are those of a [`PackedCall`], for these rows.
    """

    decoder: nn.Module
    position_ids: torch.Tensor
    last_position: int | torch.Tensor = 0


def model_call(decoder: nn.Module) -> ModelCall | None:
    """The call of the model of `decoder` that is running, if one is."""
    call = context().model
    return call if call is not None and call.decoder is decoder else None


def packed_call(decoder: nn.Module | None = None) -> PackedCall | None:
    """The packed forward that is running, if one is, and if it is that of `decoder`."""
    call = context().packed
    return call if call is not None and decoder in (None, call.decoder) else None


def rows_call(decoder: nn.Module | None = None) -> RowsCall | None:
    """The forward over rows that is running, if one is, and if it is that of `decoder`."""
    call = context().rows
    return call if call is not None and decoder in (None, call.decoder) else None
