"""
Layouts: where the tokens of a padded `(B, L)` batch lie in one packed row of `T` tokens.

A layout is built on the host, from the attention mask (padding-free) or from mask and token ids (prefix sharing). It
knows nothing of models: it is index maps, the place of each packed token in its row, and the attention segments.

Shapes: `B` rows, `L` padded length, `R` real tokens, `T` packed tokens (`T <= R`), `S` segments. `_BL`, `_R`, `_T`
after a name is the tensor's shape.

Prefix sharing is a trie. Rows are sorted; each row then begins with the longest prefix that it shares with any row
before it (`shared`), and only the rest of it is new. The new tokens of a row are one *segment*: its queries are those
tokens, its keys are the whole row from its first token on, wherever those keys were computed. That is causal attention
aligned to the bottom right, which every variable-length attention kernel knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from .flat_maps import FlatIndexMaps, cu_seqlens_of, to_device_async


if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["Layout", "pack", "unpack"]


KEYS_PER_TOKEN = 64
"""Keys that a layer gathers, and whose gradients it adds up, in the time that it takes to compute a token, about."""


@dataclass(frozen=True, eq=False)
class Layout:
    """
    Index maps between a padded batch of `B` rows and `L` columns and its packed row of `T` tokens.

    Build one with [`padding_free_layout`], [`prefix_sharing_layout`] or [`packed_layout`].

    Attributes:
        batch_shape (`tuple[int, int]`):
            `(B, L)` of the padded batch.
        real_index (`torch.Tensor` of shape `(R,)`):
            Where each real token stands in the flattened batch (`row * L + column`), ascending.
        source (`torch.Tensor` of shape `(R,)`, *optional*):
            Packed token that computes each real token. `None` when each real token is computed by itself, in order.
        packed_index (`torch.Tensor` of shape `(T,)`):
            Where each packed token stands in the flattened batch (for a shared token: in one of its rows).
        positions (`torch.Tensor` of shape `(T,)`):
            Columns between each packed token and the first real token of its row (of a row that arrived packed: of its
            sequence). A hole in a row keeps its place.
        key_index (`torch.Tensor` of shape `(sum of key_lengths,)`, *optional*):
            Tokens that are the keys of the segments, segment after segment. `None` when the keys of every segment are
            its own queries.
        cu_seqlens_q, cu_seqlens_k (`torch.Tensor` of shape `(S + 1,)`, int32):
            Where the queries and the keys of the segments begin and end. One object where they are equal: cuDNN asks.
        query_lengths, key_lengths (`tuple[int, ...]` of length `S`):
            Tokens of each segment, on the host.
        spans (`tuple[int, ...]` of length `S`):
            Columns from a segment's first key to its last, both counted: its key length, plus the holes.
        positions_among (`torch.Tensor` of shape `(n,)`, *optional*):
            `positions` of the `n` tokens that `key_index` numbers, where these are not the packed ones.
    """

    batch_shape: tuple[int, int]
    real_index: torch.Tensor
    source: torch.Tensor | None
    packed_index: torch.Tensor
    positions: torch.Tensor
    key_index: torch.Tensor | None
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    spans: tuple[int, ...]
    positions_among: torch.Tensor | None = None

    @classmethod
    def of_segments(cls, queries: Sequence[int], keys: Sequence[int], **others: Any) -> Self:
        """A layout of segments with so many `queries` and `keys` each, on the device of its `positions`."""
        device = others["positions"].device
        bounds = to_device_async(cu_seqlens_of(queries), device)
        return cls(
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds if list(queries) == list(keys) else to_device_async(cu_seqlens_of(keys), device),
            query_lengths=tuple(queries),
            key_lengths=tuple(keys),
            **others,
        )

    @property
    def padded_tokens(self) -> int:
        """`B * L`, what the padded computation puts through the decoder."""
        return self.batch_shape[0] * self.batch_shape[1]

    @property
    def real_tokens(self) -> int:
        """Tokens that the attention mask keeps."""
        return self.real_index.numel()

    @property
    def packed_tokens(self) -> int:
        """Tokens that the packed computation puts through the decoder."""
        return self.packed_index.numel()

    @property
    def computed_tokens(self) -> int:
        """Tokens that a forward of this layout computes."""
        return self.packed_tokens

    @property
    def last_index(self) -> torch.Tensor:
        """Where the last real token of each row stands in the flattened batch, `(B,)`."""
        B, L = self.batch_shape
        ends = torch.arange(1, B + 1, device=self.real_index.device) * L
        return self.real_index[torch.searchsorted(self.real_index, ends) - 1]

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries and most keys of a segment."""
        return max(self.query_lengths), max(self.key_lengths)

    @property
    def key_positions(self) -> torch.Tensor:
        """`positions` of the keys of the segments, `(sum of key_lengths,)`."""
        among = self.positions if self.positions_among is None else self.positions_among
        return among if self.key_index is None else among.index_select(0, self.key_index)

    @cached_property
    def key_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Places in `key_index` sorted by the token that they name, and where those of each token begin among them:
        the order in which the gradients of keys are summed, as [`torch.nn.functional.embedding_bag`] takes it.
        """
        assert self.key_index is not None
        among = self.positions if self.positions_among is None else self.positions_among
        with torch.inference_mode(False):  # it may serve a forward with gradients later
            tokens, order = self.key_index.sort(stable=True)
            return order, torch.searchsorted(tokens, torch.arange(len(among), device=tokens.device))

    @property
    def gathered_keys(self) -> int:
        """Keys that each layer gathers before it attends."""
        return 0 if self.key_index is None else self.key_index.numel()

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to remove and to share: the padded computation is the packed one."""
        return self.packed_tokens == self.padded_tokens and len(self.query_lengths) == self.batch_shape[0]

    @property
    def sharing_pays(self) -> bool:
        """
        Whether the tokens that are saved cost more than the keys that every layer gathers for it: little for each, but
        of whole rows, however short the prefix is that they share.
        """
        return (self.real_tokens - self.packed_tokens) * KEYS_PER_TOKEN >= self.gathered_keys

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its index maps on `device`."""
        return self if self.real_index.device == torch.device(device) else FlatIndexMaps.of(self).to(device)

    def packed_positions_of(self, flat_index: torch.Tensor) -> torch.Tensor:
        """
        Packed tokens that compute the real tokens at `flat_index` (`row * L + column` in the padded batch).

        Args:
            flat_index (`torch.Tensor` of shape `(n,)`):
                Places of real tokens. A place that holds padding has no packed token; asking for it is an error of
                the caller that is not detected.

        Returns:
            `torch.Tensor` of shape `(n,)`.
        """
        # Within bounds for any index: one that is out of range would end a CUDA context without a word.
        rank = torch.searchsorted(self.real_index, flat_index).clamp(max=self.real_tokens - 1)
        return rank if self.source is None else self.source[rank]


def pack(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """
    Gather the packed tokens of a padded batch into one row.

    Args:
        x (`torch.Tensor` of shape `(B, L, ...)`):
            Padded values, in the layout's batch.
        layout ([`Layout`]):
            Index maps built from that batch.

    Returns:
        `torch.Tensor` of shape `(1, T, ...)`.

    Raises:
        ValueError: If `x` does not have the layout's `(B, L)`.
    """
    if tuple(x.shape[:2]) != layout.batch_shape:
        raise ValueError(f"Cannot pack values of shape {tuple(x.shape)} with a layout of {layout.batch_shape}.")
    return x.flatten(0, 1).index_select(0, layout.packed_index).unsqueeze(0)


def unpack(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """
    Lay packed values back out as a padded batch. Padding becomes zero; a shared token is given to each of its rows.

    Args:
        x (`torch.Tensor` of shape `(1, T, ...)`):
            Packed values.
        layout ([`Layout`]):
            The layout that they were packed with.

    Returns:
        `torch.Tensor` of shape `(B, L, ...)`.

    Raises:
        ValueError: If `x` does not have the layout's `(1, T)`.
    """
    if tuple(x.shape[:2]) != (1, layout.packed_tokens):
        raise ValueError(
            f"Cannot unpack values of shape {tuple(x.shape)} with a layout of {layout.packed_tokens} packed tokens."
        )
    real = x[0] if layout.source is None else x[0].index_select(0, layout.source)
    if layout.real_tokens == layout.padded_tokens:
        return real.unflatten(0, layout.batch_shape)
    # In place: these zeros are new, and a second copy of the padded batch would be its peak of memory.
    padded = real.new_zeros(layout.padded_tokens, *real.shape[1:])
    return padded.index_copy_(0, layout.real_index, real).unflatten(0, layout.batch_shape)
