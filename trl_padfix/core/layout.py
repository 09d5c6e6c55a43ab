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

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from .index_maps import FlatMaps, bounds_of
from .layout_checks import check_mask, check_positions, check_two_dimensional, checked_bounds
from .pooled import Pooled
from .trie import merge_prefixes, places_by_token, shared_paths


__all__ = ["Layout", "pack", "packed_layout", "padding_free_layout", "prefix_sharing_layout", "unpack"]


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
            Packed tokens that are the keys of the segments, segment after segment. `None` when the keys of every
            segment are its own queries.
        key_order, key_offsets (`torch.Tensor` of shapes `(sum of key_lengths,)` and `(T,)`, *optional*):
            Places in `key_index`, sorted by the token that they name, and where those of each token begin.
        cu_seqlens_q, cu_seqlens_k (`torch.Tensor` of shape `(S + 1,)`, int32):
            Where the queries and the keys of the segments begin and end. One object where they are equal: cuDNN asks.
        query_lengths, key_lengths (`tuple[int, ...]` of length `S`):
            Tokens of each segment, on the host.
        spans (`tuple[int, ...]` of length `S`):
            Columns from a segment's first key to its last, both counted: its key length, plus the holes.
        scored (`torch.Tensor` of shape `(n,)`, *optional*): Places of `(B, L - 1)` from which a label is predicted.
        images_repeat (`bool`, *optional*): Whether the halves of the batch have the same images.
        pooled ([`Pooled`], *optional*): The tokens that a sequence classifier scores. These three, if they were known.
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
    key_order: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    scored: torch.Tensor | None = None
    images_repeat: bool | None = None
    pooled: Pooled | None = None

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
    def gathered_keys(self) -> int:
        """Keys that each layer gathers before it attends."""
        return 0 if self.key_index is None else self.key_index.numel()

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to remove and to share: the padded computation is the packed one."""
        return self.packed_tokens == self.padded_tokens and len(self.query_lengths) == self.batch_shape[0]

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its index maps on `device`."""
        return self if self.real_index.device == torch.device(device) else FlatMaps.of(self).to(device)

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
        rank = torch.searchsorted(self.real_index, flat_index)
        return rank if self.source is None else self.source[rank]


def padding_free_layout(attention_mask: torch.Tensor) -> Layout:
    """
    Layout that drops the padding of a batch and keeps every real token.

    Args:
        attention_mask (`torch.Tensor` of shape `(B, L)`):
            1 for real tokens, 0 for padding, anywhere: left, right, both ends, holes.

    Returns:
        [`Layout`] on the mask's device. Costs one device synchronisation.

    Raises:
        ValueError: If the mask is not two-dimensional, holds other values than 0 and 1, or has a row without a real
            token.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import pack, padding_free_layout

    >>> layout = padding_free_layout(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    >>> pack(torch.tensor([[9, 5, 6], [5, 6, 7]]), layout)
    tensor([[5, 6, 5, 6, 7]])
    >>> layout.positions
    tensor([0, 1, 0, 1, 2])

    ```
    """
    return _build(attention_mask, [])


def prefix_sharing_layout(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor | None = None
) -> Layout:
    """
    Layout that drops the padding of a batch and keeps every distinct prefix once.

    Two tokens are one if their rows agree in every real token up to and including them: the same ids at the same
    positions. In a causal decoder such tokens have the same hidden states.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`):
            Token ids.
        attention_mask (`torch.Tensor` of shape `(B, L)`):
            1 for real tokens, 0 for padding.
        position_ids (`torch.Tensor` of shape `(B, L)` or `(P, B, L)`, *optional*):
            Positions that the decoder is given, if it is given any; rows with other positions share nothing.

    Returns:
        [`Layout`] on the mask's device. Costs one device synchronisation.

    Raises:
        ValueError: As [`padding_free_layout`], and if shapes or devices of the arguments disagree.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import pack, prefix_sharing_layout

    >>> ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 0]])
    >>> layout = prefix_sharing_layout(ids, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    >>> pack(ids, layout)
    tensor([[1, 2, 3, 4, 5]])
    >>> layout.query_lengths, layout.key_lengths
    ((4, 1), (4, 3))

    ```
    """
    keys = [input_ids]
    if position_ids is not None:
        # One row of positions may stand for all rows of the batch, as transformers' decoders allow.
        keys += list(position_ids.expand(*position_ids.shape[:-2], *input_ids.shape).reshape(-1, *input_ids.shape))
    for key in keys:
        if key.shape != attention_mask.shape or key.device != attention_mask.device:
            raise ValueError(
                f"Prefix sharing compares token ids of shape {tuple(key.shape)} on {key.device} under an attention "
                f"mask of shape {tuple(attention_mask.shape)} on {attention_mask.device}. They must have one shape "
                "`(B, L)` and lie on one device: move or slice them together."
            )
    return _build(attention_mask, keys)


def packed_layout(
    position_ids: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, input_ids: torch.Tensor | None = None
) -> Layout:
    """
    Layout of rows that arrive packed: each holds several sequences, one behind the other, and nothing else.

    Args:
        position_ids (`torch.Tensor` of shape `(B, L)`):
            A sequence begins at each row's first token, and wherever a position is not the one after the position
            before it.
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`, *optional*):
            Where the sequences begin in the flattened batch; the positions are not asked then.
        input_ids (`torch.Tensor` of shape `(B, L)`, *optional*):
            If given, sequences that begin alike, at the same positions, share their prefixes.

    Returns:
        [`Layout`] on the device of the positions. Costs one device synchronisation.

    Raises:
        ValueError: If the positions are not two-dimensional, `input_ids` is not like them, or `cu_seqlens` does not
            ascend from 0 to `B * L` in whole numbers.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import packed_layout

    >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
    >>> packed_layout(positions).query_lengths
    (3, 2)
    >>> packed_layout(positions, input_ids=torch.tensor([[5, 6, 7, 5, 6]])).packed_tokens
    3

    ```
    """
    check_positions(position_ids, input_ids)
    given = [position_ids] if input_ids is None else [position_ids, input_ids]
    given_BL = torch.stack([x.to(torch.int64) for x in given]).cpu()
    B, L = position_ids.shape
    if cu_seqlens is None:
        begins = given_BL[0].diff(dim=1, prepend=given_BL[0, :, :1]) != 1
    else:
        begins = torch.zeros(B, L, dtype=torch.bool)
        begins.view(-1)[checked_bounds(cu_seqlens, B * L)] = True
    begins[:, 0] = True  # no sequence goes on in the next row
    place = torch.arange(B * L)
    first = begins.flatten().nonzero().squeeze(1)
    lengths = first.diff(append=torch.tensor([B * L]))
    keys = [] if input_ids is None else [x.flatten() for x in given_BL]
    position = place - first.repeat_interleave(lengths)
    return _lay_out((B, L), place, position, lengths.tolist(), keys).to(position_ids.device)


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


def _build(mask: torch.Tensor, keys: list[torch.Tensor]) -> Layout:
    """The layout of `mask`, with rows that agree in all `keys` shared; without keys nothing is shared."""
    check_two_dimensional(mask)
    given = [mask, *keys]
    if mask.device.type != "cpu":  # one copy to the host, and so one synchronisation, for all that is read
        given = list(torch.stack([x.to(torch.int64) for x in given]).cpu())
    kept_BL, keys_BL = check_mask(mask, given[0]), given[1:]
    B, L = kept_BL.shape
    lengths = np.count_nonzero(kept_BL, axis=1)
    is_full = bool((lengths == L).all())
    real_index = torch.arange(B * L) if is_full else torch.from_numpy(np.flatnonzero(kept_BL))
    # Rows without holes are counted from 0 on, and need no positions to be told apart by.
    first, behind = kept_BL.argmax(1), L - kept_BL[:, ::-1].argmax(1)
    position_R = None
    if (behind - first != lengths).any():
        begins = torch.from_numpy(np.arange(B) * L + first)
        position_R = real_index - begins.repeat_interleave(torch.from_numpy(lengths))
    keys_R = [k.flatten() if is_full else k.flatten()[real_index] for k in keys_BL]
    return _lay_out((B, L), real_index, position_R, lengths.tolist(), keys_R).to(mask.device)


def _lay_out(
    batch_shape: tuple[int, int],
    real_index: torch.Tensor,
    position_R: torch.Tensor | None,
    lengths: list[int],
    keys_R: list[torch.Tensor],
) -> Layout:
    """
    The layout of the real tokens of sequences of `lengths`, one behind the other, on the host.

    Sequences that agree in all `keys_R` and in their positions (by default without holes) are shared.
    """
    begins = [0, *accumulate(lengths)][:-1]
    if not keys_R:
        segments = [(begin, 0, length) for begin, length in zip(begins, lengths, strict=True)]
        source, packed_index = None, real_index
    else:
        trie = merge_prefixes(keys_R if position_R is None else [position_R, *keys_R], lengths)
        rows = [(begins[row], own, lengths[row]) for row, own in zip(*trie, strict=True)]
        source = shared_paths(rows, len(real_index))
        # A row that another one begins with, or is, may have no token of its own: then it has no segment.
        segments = [(begin, own, length) for begin, own, length in rows if length > own]
        packed_index = torch.cat([real_index[begin + own : begin + length] for begin, own, length in segments])
    query_lengths, key_lengths = [n - own for _, own, n in segments], [n for *_, n in segments]
    if position_R is None:
        positions = torch.cat([torch.arange(own, n) for _, own, n in segments])
    else:
        positions = torch.cat([position_R[begin + own : begin + n] for begin, own, n in segments])

    key_index = key_order = key_offsets = None
    cu_seqlens_q = cu_seqlens_k = bounds_of(query_lengths)
    if source is not None and query_lengths != key_lengths:
        key_index = torch.cat([source[begin : begin + n] for begin, _, n in segments])
        key_order, key_offsets = places_by_token([own for _, own, _ in segments], key_lengths)
        cu_seqlens_k = bounds_of(key_lengths)
    return Layout(
        batch_shape=batch_shape,
        real_index=real_index,
        source=source,
        packed_index=packed_index,
        positions=positions,
        key_index=key_index,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(key_lengths),
        spans=tuple((positions[cu_seqlens_q[1:] - 1] + 1).tolist()),
        key_order=key_order,
        key_offsets=key_offsets,
    )
