"""
The mask that a decoder asks for, as a description instead of a tensor.

Windows and chunks of `sdpa` and `eager` models stand in their masks; some attention modules are not told of them in
any other way. Inside a packed forward transformers' mask interface gives a [`PackedMask`] for a mask: it travels
through the layers where the tensor would, and says what to leave out within a row. Nothing of size `(T, T)` is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


__all__ = ["PackedMask", "describe_mask"]


@dataclass(frozen=True)
class PackedMask:
    """What a mask lets a token see, within its own row."""

    causal: bool = True
    window: int | None = None  # tokens seen at most, the own one counted
    chunk: int | None = None  # rows are cut into chunks of so many places, and a token sees its own chunk only
    custom: bool = False  # the model adds a condition of its own
    kind: str | None = None  # of masks that were prepared, the type of the layers that it is for

    def __getitem__(self, index: Any) -> PackedMask:
        # Some layers cut their mask to the keys at hand; without a cache these are all keys.
        return self

    def to(self, *args: Any, **kwargs: Any) -> PackedMask:
        return self  # MPT casts its mask

    @property
    def ndim(self) -> int:
        return 0  # Falcon adds ALiBi to a mask of four dimensions


def describe_mask(*args: Any, config: Any = None, local_size: int | None = None, **kwargs: Any) -> PackedMask:
    """A mask function of transformers' interface: windows and chunks both come as `local_size`."""
    is_empty = local_size is not None and local_size < 1
    is_chunk = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    is_window = local_size is not None and local_size == getattr(config, "sliding_window", None)
    # What is added to a mask last lets tokens see more: blocks (of an image, of a prompt) that see each other.
    is_widened = getattr(kwargs.get("mask_function"), "__qualname__", "").startswith("or_masks")
    return PackedMask(
        causal="allow_is_bidirectional_skip" not in kwargs,
        window=local_size if not is_chunk else None,
        chunk=local_size if is_chunk else None,
        # Conditions that a model adds are evaluated with vmap; a size that is window and chunk alike says neither.
        custom=bool(kwargs.get("use_vmap")) or is_widened or is_empty or (is_chunk and is_window),
    )
