"""
The mask that a decoder asks for, as a description instead of a tensor.

Windows and chunks of `sdpa` and `eager` models stand in their masks; some attention modules are not told of them in
any other way. Inside a packed forward transformers' mask interface gives a [`PackedMask`] for a mask: it travels
through the layers where the tensor would, and says what to leave out within a row. Nothing of size `(T, T)` is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


__all__ = ["PackedMask", "describing_masks", "known_positions"]


@dataclass(frozen=True)
class PackedMask:
    """
    What a mask lets a token see, within its own row.

    Attributes:
        causal (`bool`): Whether later tokens are hidden.
        window (`int`, *optional*): Tokens seen at most, the own one counted.
        chunk (`int`, *optional*): Rows are cut into chunks of this many places, and a token sees its own chunk only.
        custom (`bool`): Whether the model adds a condition of its own.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    custom: bool = False

    def __getitem__(self, index: Any) -> PackedMask:
        # Some layers cut their mask to the keys at hand; without a cache these are all keys.
        return self


@contextmanager
def describing_masks(implementation: str) -> Iterator[None]:
    """Let transformers describe the masks of models with attention `implementation`, until the block ends."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError:  # decoders made their masks themselves before 4.53
        yield
        return
    # The mask functions look for the name among those registered for all models, and nowhere else.
    registered = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    outermost = implementation not in registered
    if outermost:
        registered[implementation] = _describe
    try:
        yield
    finally:
        if outermost:
            registered.pop(implementation, None)


@contextmanager
def known_positions(positions: torch.Tensor) -> Iterator[None]:
    """Spare transformers its search for packed rows in `positions`, which waits for the device."""
    try:
        from transformers import masking_utils

        search = masking_utils.find_packed_sequence_indices
    except (ImportError, AttributeError):  # 4.52 and, under another name, some versions after it
        yield
        return

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if position_ids.data_ptr() == positions.data_ptr() else search(position_ids)

    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


def _describe(*args: Any, config: Any = None, local_size: int | None = None, **kwargs: Any) -> PackedMask:
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
