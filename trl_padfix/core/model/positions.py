"""
Positions of packed tokens, for decoders that number their tokens themselves.

Most decoders take `position_ids`, and number columns where they are given none. Three kinds do otherwise: those whose
positional embedding counts the columns of the batch (BART and its kin), those that count the tokens that are not
padding, from `padding_idx + 1` on (RoBERTa and its kin), and those that sum the mask up (OPT and its kin). Some rotary
embeddings also look at the largest position of a forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..layout.layout import Layout, pack


__all__ = ["Numbering", "length_dependent_ropes", "packed_positions", "position_embeddings", "takes_positions"]


def takes_positions(decoder: nn.Module) -> bool:
    """Whether the forward of a decoder is given the positions of its tokens."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


def position_embeddings(decoder: nn.Module) -> list[nn.Embedding]:
    """The embeddings that a decoder without `position_ids` hands the positions of its columns to."""
    if takes_positions(decoder):
        return []
    tables = [module for module in decoder.children() if isinstance(module, nn.Embedding)]
    return [table for table in tables if "position_ids" in inspect.signature(table.forward).parameters]


@dataclass(frozen=True, eq=False)
class Numbering:
    """
    How a decoder that takes positions numbers its tokens where it is given none; by their columns, if nothing is set.

    `by_ids` is the module that numbers them by what their ids are; `by_mask` sums the mask up: holes do not count.
    """

    by_ids: nn.Module | None = None
    by_mask: bool = False

    @classmethod
    def of(cls, decoder: nn.Module) -> Numbering:
        """The numbering of a decoder, found in its code."""
        by_ids = next((m for m in decoder.modules() if _numbers_ids(m) is not None), None)
        forwards = (inspect.unwrap(type(module).forward) for module in decoder.modules())
        codes = [forward.__code__ for forward in forwards if hasattr(forward, "__code__")]
        # The outermost module that numbers anything gives the positions to those within it.
        named = [set(c.co_names) for c in codes if {"attention_mask", "position_ids"} <= set(c.co_varnames)]
        numbering = next((names for names in named if names & {"arange", "cumsum"}), set())
        return cls(by_ids, "cumsum" in numbering)

    @property
    def by_columns(self) -> bool:
        """Whether padding before a row moves its tokens."""
        return self.by_ids is None and not self.by_mask


def length_dependent_ropes(decoder: nn.Module) -> dict[nn.Module, str]:
    """The rotary embeddings of a decoder whose frequencies depend on the largest position of a forward, by kind."""
    types = {module: getattr(module, "rope_type", None) for module in decoder.modules()}
    kinds: dict[Any, set[Any]] = {m: set(t.values() if isinstance(t, dict) else [t]) for m, t in types.items()}
    return {m: kind for m, found in kinds.items() for kind in found & {"dynamic", "longrope"}}


def packed_positions(numbering: Numbering, call: dict[str, Any], layout: Layout) -> torch.Tensor:
    """Positions of packed tokens, `(T,)`, where a `call` has none: as the decoder gives them to each row alone."""
    numbers: Any = numbering.by_ids
    number = _numbers_ids(numbers)
    if number is None:
        return _ranks(layout) if numbering.by_mask else layout.positions
    ids, mask = call.get("input_ids"), call.get("attention_mask")
    padding_idx: int = numbers.padding_idx
    if ids is None:
        return layout.positions + padding_idx + 1
    if mask is not None:  # what stands before a row is padding to the numbering too, whatever its id
        ids = ids.masked_fill(mask.cumsum(1) == 0, padding_idx)
    return pack(number(ids, padding_idx), layout)[0]


def _numbers_ids(module: nn.Module | None) -> Callable[..., torch.Tensor] | None:
    """The function by which an embedding numbers tokens by their ids: its method or, in older versions, a global."""
    name = "create_position_ids_from_input_ids"
    method = getattr(module, name, None)
    if module is None or method is not None or not hasattr(module, "padding_idx") or isinstance(module, nn.Embedding):
        return method
    forward = inspect.unwrap(type(module).forward)
    return forward.__globals__.get(name) if name in forward.__code__.co_names else None


def _ranks(layout: Layout) -> torch.Tensor:
    """Real tokens before each packed one in its row, `(T,)`."""
    ends = zip(layout.query_lengths, layout.key_lengths, strict=True)
    return torch.cat([torch.arange(k - q, k) for q, k in ends]).to(layout.positions.device)
