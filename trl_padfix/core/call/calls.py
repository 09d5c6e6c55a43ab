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
from ..parallel.layout import ContextParallelLayout
from .prefix_states import PrefixStates
from .prepared_masks import PreparedMasks


__all__ = ["LAYOUT", "ModelCall", "PackedCall", "RowsCall", "model_call", "packed_call", "rows_call"]

LAYOUT = "padding_layout"
"""Keyword under which a [`PackedCall`] travels from the decoder through its layers to the attention function."""


@dataclass(frozen=True, eq=False)
class ModelCall:
    """One call of an attached model, from its head to its decoder and back."""

    decoder: nn.Module  # of the model that was called
    arguments: dict[str, Any] = field(default_factory=dict)  # of the module around the decoder: ids and mask
    scored: torch.Tensor | None = None  # `(n,)`: places in the flattened batch; the decoder returns no other states
    given: dict[str, Any] = field(default_factory=dict)  # the model's: mask, positions, bounds, for its decoder
    selects: bool = False  # the model takes columns of what the decoder returns, in any order, before its head
    pools_last: bool = False  # the decoder returns the state of a row's last real token in all columns of the row
    layout: Layout | None = None  # of the `(B, L, H)` that the decoder has returned, for what comes after it
    doubled_features: list[weakref.ref[torch.Tensor]] = field(
        default_factory=list
    )  # what towers answered with equal halves


@dataclass(frozen=True, eq=False)
class PackedCall:
    """
    One packed forward: what its layers need to know.

    It lives as long as the forward can still be recomputed: gradient checkpointing keeps it until backward is done.
    """

    layout: Layout
    implementation: str  # of attention, to compute with
    decoder: nn.Module
    position_ids: torch.Tensor  # as the decoder is given them
    last_position: int | torch.Tensor = 0  # the largest one of the padded call, padding included
    dry_run: Callable[..., Any] = lambda rows: []  # tells how the decoder calls its layers for rows
    prepared: PreparedMasks | None = None  # that the decoder was given, where its own would not do
    one_block: bool = False  # the rows of all mixers are one block, so that every process runs a mixer once
    prefix_states: PrefixStates | None = None  # states of tokens that other forwards have computed
    cp_layout: ContextParallelLayout | None = (
        None  # how the packed row is cut, where each process of a group computes a part
    )
    made: dict[Any, Any] = field(default_factory=dict)  # see `once`

    @property
    def own_tokens(self) -> int:
        """Packed tokens that this process computes."""
        return (
            self.layout.packed_tokens if self.cp_layout is None else self.cp_layout.tokens[self.cp_layout.group.rank]
        )

    def once(self, key: Any, build: Callable[[], Any]) -> Any:
        """What `build` makes for this forward: made at the first call with `key`, and kept for the recomputation."""
        if key not in self.made:  # two threads of a backward may both build it: it comes out the same
            self.made[key] = build()
        return self.made[key]


@dataclass(frozen=True, eq=False)
class RowsCall:
    """A forward of a decoder over rows with its layers left out (`dry_run.py`), with fields of a [`PackedCall`]."""

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
