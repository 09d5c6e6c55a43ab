"""
Description of the mask that a decoder makes, in place of a tensor.

Models with `sdpa` and `eager` attention have windows and chunks in their masks; some attention modules receive them in
no other way. In a packed forward transformers' mask interface returns a [`PackedMask`] instead of a mask. It passes
through the layers like the tensor would, and describes which keys a token leaves out within its row. No tensor of size
`(T, T)` is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from .inspection import name_of


__all__ = ["PackedMask", "describe_mask"]


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

    @property
    def ndim(self) -> int:
        return 0  # Falcon would add ALiBi to a mask of four dimensions


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
