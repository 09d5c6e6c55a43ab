"""
Positions of packed tokens, and which earlier positions a token sees.

Most decoders take `position_ids`, and number the columns of the batch if there are none. Three kinds differ:

- a positional embedding numbers the columns of the batch (BART and similar models);
- tokens that are not padding are numbered from `padding_idx + 1` on (RoBERTa and similar models);
- positions are the cumulative sum of the mask (OPT and similar models).

The frequencies of some rotary embeddings also depend on the largest position of a forward.

Models with `sdpa` and `eager` attention have windows and chunks in their masks; some attention modules receive them in
no other way. In a packed forward transformers' mask interface returns a [`PackedMask`] instead of a mask. It passes
through the layers like the tensor would, and describes which keys a token leaves out within its row. No tensor of size
`(T, T)` is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from ..layout.layout import Layout, pack
from .inspection import forwards_in, global_in, name_of, names_in, takes, variables_in


__all__ = [
    "Numbering", "PackedMask", "describe_mask", "length_dependent_ropes", "packed_positions", "position_embeddings",
]  # fmt: skip


def position_embeddings(decoder: nn.Module) -> list[nn.Embedding]:
    """The positional embeddings of a decoder without an argument `position_ids`; they receive the columns' numbers."""
    if takes(decoder, "position_ids"):
        return []
    tables = [module for module in decoder.modules() if isinstance(module, nn.Embedding)]
    return [table for table in tables if takes(table, "position_ids")]


@dataclass(frozen=True, eq=False)
class Numbering:
    """
    How a decoder that takes `position_ids` numbers its tokens in a call without them.

    Attributes:
        embedding (`torch.nn.Module`, *optional*): The embedding that numbers tokens whose id is not `padding_idx`.
        by_mask (`bool`): Whether positions are the cumulative sum of the mask, so that masked tokens do not count.
        has_table (`bool`): Whether an embedding has a vector for each position (GPT-2): positions are absolute.
    """

    embedding: nn.Module | None = None
    by_mask: bool = False
    has_table: bool = False

    @classmethod
    def of(cls, decoder: Any) -> Numbering:
        """The numbering of a decoder, read from the code of its modules."""
        embedding = next((m for m in decoder.modules() if _numbers_ids(m) is not None), None)
        forwards = forwards_in(decoder)
        # `modules()` lists outer modules first: the outermost one that numbers tokens decides for those within it.
        named = [set(names_in(f)) for f in forwards if {"attention_mask", "position_ids"} <= set(variables_in(f))]
        numbering = next((names for names in named if names & {"arange", "cumsum"}), set())
        length = getattr(decoder.config, "max_position_embeddings", None)
        tables = {m for m in decoder.modules() if isinstance(m, nn.Embedding)} - {decoder.get_input_embeddings()}
        return cls(embedding, "cumsum" in numbering, any(table.num_embeddings == length for table in tables))

    @property
    def by_columns(self) -> bool:
        """Whether positions are columns of the batch, so that padding before a row changes them."""
        return self.embedding is None and not self.by_mask


def length_dependent_ropes(decoder: nn.Module) -> dict[nn.Module, str]:
    """The rotary embeddings of a decoder whose frequencies depend on the largest position of a forward, by kind."""
    # `rope_type` is a string, or a `dict` of strings by type of layer.
    types = {module: getattr(module, "rope_type", None) for module in decoder.modules()}
    kinds: dict[Any, set[Any]] = {m: set(t.values() if isinstance(t, dict) else [t]) for m, t in types.items()}
    return {m: kind for m, types_of in kinds.items() for kind in types_of & {"dynamic", "longrope"}}


def packed_positions(
    numbering: Numbering, ids: torch.Tensor | None, mask: torch.Tensor | None, layout: Layout
) -> torch.Tensor:
    """Positions of packed tokens, `(T,)`, for a call without `position_ids`, as if each row were computed alone."""
    embedding: Any = numbering.embedding
    number = _numbers_ids(embedding)
    if number is None:
        return _ranks(layout) if numbering.by_mask else layout.positions
    padding_idx: int = embedding.padding_idx
    if ids is None:
        return layout.positions + padding_idx + 1
    if mask is not None:
        # Columns before a row may have any id. The numbering must skip them, as if the row were computed alone.
        ids = ids.masked_fill(mask.cumsum(1) == 0, padding_idx)
    return pack(number(ids, padding_idx), layout)[0]


def _numbers_ids(module: nn.Module | None) -> Callable[..., torch.Tensor] | None:
    """
    The function with which an embedding numbers tokens by their ids; `None` if it does not.

    It is a method of the embedding or, in older versions, a global of its file.
    """
    name = "create_position_ids_from_input_ids"
    method = getattr(module, name, None)
    if module is None or method is not None or not hasattr(module, "padding_idx") or isinstance(module, nn.Embedding):
        return method
    return global_in(module, name)


def _ranks(layout: Layout) -> torch.Tensor:
    """Number of real tokens before each packed token in its row, `(T,)`."""
    # A segment of `q` queries and `k` keys ends its path, so its tokens have ranks `k - q` to `k - 1`.
    ends = zip(layout.queries.lengths, layout.keys.lengths, strict=True)
    return torch.cat([torch.arange(k - q, k) for q, k in ends]).to(layout.positions.device)


@dataclass(frozen=True)
class PackedMask:
    """Which keys of its own row a token sees."""

    causal: bool = True
    window: int | None = None  # maximum number of keys that a token sees, its own included
    chunk: int | None = None  # rows are cut into chunks of this many columns; a token sees its own chunk only
    custom: bool = False  # the model adds another condition, which is not described here
    kind: str | None = None  # type of the layers that a prepared mask is for

    def __getitem__(self, index: object) -> PackedMask:
        return self  # some layers cut the mask to their keys; without a cache these are all keys

    def to(self, *args: Any, **kwargs: Any) -> PackedMask:
        return self  # MPT casts its mask to a dtype

    ndim = 0  # Falcon would add ALiBi to a mask of four dimensions


def describe_mask(
    *args: Any, config: PretrainedConfig | None = None, local_size: int | None = None, **kwargs: Any
) -> PackedMask:
    """A mask function of transformers' interface. It receives both windows and chunks as `local_size`."""
    is_empty = local_size is not None and local_size < 1
    sizes = (getattr(config, name, None) for name in ("attention_chunk_size", "sliding_window"))
    is_chunk, is_window = (local_size is not None and local_size == size for size in sizes)
    # `or_masks` lets tokens see more than causal ones: the tokens of an image, or of a prompt, see each other.
    is_widened = name_of(kwargs.get("mask_function")).startswith("or_masks")
    return PackedMask(
        # transformers passes this argument for bidirectional masks only.
        causal="allow_is_bidirectional_skip" not in kwargs,
        window=local_size if not is_chunk else None,
        chunk=local_size if is_chunk else None,
        # Conditions that a model adds are evaluated with vmap. A size that is both the window and the chunk size of
        # the config is ambiguous.
        custom=bool(kwargs.get("use_vmap")) or is_widened or is_empty or (is_chunk and is_window),
    )
