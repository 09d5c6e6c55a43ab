"""
Layouts: index maps between a padded `(B, L)` batch and its packed row of `T` tokens.

A layout is built on the host, from the attention mask (padding-free) or from mask and token ids (prefix sharing). It
holds index maps, the position of each packed token and the segments for attention, and nothing about a model.

Shapes: `B` rows, `L` padded length, `R` real tokens, `T` packed tokens (`T <= R`), `S` segments. A suffix such as
`_BL`, `_R` or `_T` of a name is the tensor's shape.

With prefix sharing the rows of a batch form a prefix tree. Rows are sorted; each row then begins with the longest
prefix that it shares with any row before it, and only the rest of it is new. The new tokens of a row are one
*segment*. The queries of a segment are its new tokens; its keys are its *path*, all tokens of the row up to the end of
the segment, wherever they are computed. Attention is causal and aligned to the bottom right: the last query is the
last key. All variable-length attention kernels support this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from ..errors import require


__all__ = [
    "Layout", "SegmentLengths", "cu_seqlens_of", "move_maps", "pack", "packed_length",
    "to_device_async", "unpack",
]  # fmt: skip

GATHERED_KEYS_PER_TOKEN = 64
"""Computing one token costs about as much as gathering 64 keys, backward included."""


@dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """
    Index maps between a padded batch of `B` rows and `L` columns and its packed row of `T` tokens.

    Build one with [`padding_free_layout`], [`prefix_sharing_layout`] or [`packed_layout`]. It holds what flash-attn's
    `unpad_input` returns (`indices`, `cu_seqlens`, `max_seqlen`) and what xformers' `BlockDiagonalMask` describes;
    [`Layout.dense_mask`] writes that mask out.

    Attributes:
        batch_shape (`tuple[int, int]`):
            `(B, L)` of the padded batch.
        real_index (`torch.Tensor` of shape `(R,)`):
            Index of each real token in the flattened batch (`row * L + column`), ascending: flash-attn's `indices`.
        source (`torch.Tensor` of shape `(R,)`, *optional*):
            Packed token that computes each real token: the inverse index of `packed_index`. `None` if packed and real
            tokens are the same, in one order.
        packed_index (`torch.Tensor` of shape `(T,)`):
            Index of each packed token in the flattened batch; for a shared token the index in one of its rows.
        positions (`torch.Tensor` of shape `(T,)`):
            Position of each packed token in its row (pre-packed batch: in its sequence), counted from the first real
            token. Masked tokens in between count.
        key_index (`torch.Tensor` of shape `(sum of keys,)`, *optional*):
            Packed tokens that are the keys of the segments, segment after segment (TRL: `tree_kv_index`). `None` if
            the keys of each segment are its queries.
        queries, keys ([`SegmentLengths`]):
            Number of queries and of keys of each segment. If equal, both have the same `cu_seqlens` object: cuDNN
            accepts causal calls only with one object for both.
        spans (`tuple[int, ...]` of length `S`):
            Columns from the first key of each segment to its last, both included: its key length plus its holes.
        key_source_positions (`torch.Tensor` of shape `(n,)`, *optional*):
            `positions` of the `n` tokens that `key_index` indexes. `None` if these are the packed tokens.
        filler (`int`, *optional*):
            Packed tokens at the end of the row that belong to no row of the batch ([`Layout.filled`]). `None` if no
            row length was requested.

    Example: two rows, the first two tokens shared.

    ```python
    >>> import torch
    >>> from trl_padfix import prefix_sharing_layout

    >>> ids = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 5]])
    >>> layout = prefix_sharing_layout(ids, (ids > 0).long())
    >>> layout
    Layout((2, 4): 8 padded, 7 real, 5 packed tokens)
    >>> layout.real_index, layout.source
    (tensor([0, 1, 2, 3, 5, 6, 7]), tensor([0, 1, 2, 3, 0, 1, 4]))
    >>> layout.packed_index, layout.positions
    (tensor([0, 1, 2, 3, 7]), tensor([0, 1, 2, 3, 2]))
    >>> layout.queries.cu_seqlens, layout.keys.cu_seqlens
    (tensor([0, 4, 5], dtype=torch.int32), tensor([0, 4, 7], dtype=torch.int32))
    >>> layout.key_index.split(layout.keys.lengths)
    (tensor([0, 1, 2, 3]), tensor([0, 1, 4]))

    ```
    """

    batch_shape: tuple[int, int]
    real_index: torch.Tensor
    source: torch.Tensor | None
    packed_index: torch.Tensor
    positions: torch.Tensor
    key_index: torch.Tensor | None
    queries: SegmentLengths
    keys: SegmentLengths
    spans: tuple[int, ...]
    key_source_positions: torch.Tensor | None = None
    filler: int | None = None

    def __repr__(self) -> str:
        counts = f"{self.padded_tokens} padded, {self.real_tokens} real, {self.packed_tokens} packed tokens"
        return f"{type(self).__name__}({self.batch_shape}: {counts})"

    @classmethod
    def of_segments(cls, query_lengths: Sequence[int], key_lengths: Sequence[int], **fields: Any) -> Self:
        """A layout with segments of these lengths, on the device of its `positions`; `fields` are its other fields."""
        device = fields["positions"].device
        queries = SegmentLengths.of(query_lengths, device)
        is_equal = list(query_lengths) == list(key_lengths)
        return cls(queries=queries, keys=queries if is_equal else SegmentLengths.of(key_lengths, device), **fields)

    @property
    def padded_tokens(self) -> int:
        """`B * L`: tokens that the decoder computes for the padded batch."""
        return self.batch_shape[0] * self.batch_shape[1]

    @property
    def real_tokens(self) -> int:
        """Tokens that the attention mask keeps."""
        return self.real_index.numel()

    @property
    def packed_tokens(self) -> int:
        """`T`: tokens of the packed row, with its filler."""
        return self.packed_index.numel()

    @property
    def computed_tokens(self) -> int:
        """
        Tokens of the batch that a forward with this layout computes: `T` without filler, and without tokens that other
        forwards have computed.
        """
        return self.packed_tokens - (self.filler or 0)

    @property
    def last_index(self) -> torch.Tensor:
        """Index of each row's last real token in the flattened batch, `(B,)`."""
        B, L = self.batch_shape
        ends = torch.arange(1, B + 1, device=self.real_index.device) * L
        # `real_index` ascends: the last real token of a row is the one before the first at or after the row's end.
        return self.real_index[torch.searchsorted(self.real_index, ends) - 1]

    @property
    def indexed_positions(self) -> torch.Tensor:
        """`positions` of the tokens that `key_index` indexes: by default the packed ones."""
        return self.positions if self.key_source_positions is None else self.key_source_positions

    @property
    def key_positions(self) -> torch.Tensor:
        """`positions` of the keys of the segments, `(sum of keys,)`."""
        return self.positions if self.key_index is None else self.indexed_positions.index_select(0, self.key_index)

    @cached_property
    def key_sort_order(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Places in `key_index`, sorted by token, and the first of these places of each token.

        The gradient of a token is the sum over its places: `input` and `offsets` of
        [`torch.nn.functional.embedding_bag`].

        Example: tokens 0 and 1 are keys of two segments.

        ```python
        >>> import torch
        >>> from trl_padfix import prefix_sharing_layout

        >>> layout = prefix_sharing_layout(torch.tensor([[1, 2, 3], [1, 2, 5]]), torch.ones(2, 3))
        >>> layout.key_index
        tensor([0, 1, 2, 0, 1, 3])
        >>> layout.key_sort_order
        (tensor([0, 3, 1, 4, 2, 5]), tensor([0, 2, 4, 5]))

        ```
        """
        assert self.key_index is not None
        # Stable, so that a sum has one order and gradients are the same in each run. No inference tensors: a forward
        # with gradients may use the cached value later.
        with torch.inference_mode(False):
            tokens, order = self.key_index.sort(stable=True)
            return order, torch.searchsorted(tokens, torch.arange(len(self.indexed_positions), device=tokens.device))

    @property
    def is_trivial(self) -> bool:
        """Whether the batch has neither padding nor shared prefixes, so that packing would change nothing."""
        if self.filler is not None:
            return False  # the batch itself differs in shape from the packed rows of a run
        # In a pre-packed batch a row without padding may have several segments, which must be kept apart.
        return self.packed_tokens == self.padded_tokens and len(self.queries.lengths) == self.batch_shape[0]

    @property
    def sharing_pays(self) -> bool:
        """
        Whether the shared tokens cost more than the keys that each layer gathers.

        A gathered key costs little, but a layer gathers all keys of a row, however short its shared prefix is.
        """
        gathered_keys = 0 if self.key_index is None else self.key_index.numel()
        return (self.real_tokens - self.packed_tokens) * GATHERED_KEYS_PER_TOKEN >= gathered_keys

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its index maps on `device`."""
        return self if self.real_index.device == torch.device(device) else move_maps(self, device)

    def filled(self, multiple: int | Sequence[int]) -> Self:
        """
        The same layout with filler after its last token, so that `T` is a multiple of `multiple`.

        With several lengths `T` is the smallest length that holds the row; a longer row gets a multiple of the largest
        length. Filler repeats the longest segment, in segments of its own: no token of the batch sees it, and
        [`unpack`] drops it. The layout is built once for each length.

        Example:

        ```python
        >>> import torch
        >>> from trl_padfix import padding_free_layout

        >>> layout = padding_free_layout(torch.tensor([[0, 1, 1], [1, 1, 1]])).filled(8)
        >>> layout.packed_tokens, layout.filler, layout.queries.lengths
        (8, 3, (2, 3, 3))
        >>> layout.packed_index
        tensor([1, 2, 3, 4, 5, 3, 4, 5])

        ```
        """
        length = packed_length(self.packed_tokens, multiple)
        if length not in self._filled:
            with torch.inference_mode(False):  # a later forward with gradients cannot use inference tensors
                self._filled[length] = self._with_filler(length - self.packed_tokens)
        return self._filled[length]

    @cached_property
    def _filled(self) -> dict[int, Self]:
        """Layouts with filler that were built before, by the length of their row."""
        return {}

    def _with_filler(self, filler: int) -> Self:
        queries, keys = self.queries.lengths, self.keys.lengths
        # Filler copies tokens of the batch, because the model accepts their positions, embeddings and masks. A segment
        # that is a whole row is preferred, because image masks belong to whole rows.
        segment = max(range(len(queries)), key=lambda s: (queries[s] == keys[s], queries[s]))
        begin, length = sum(queries[:segment]), queries[segment]
        lengths = [min(length, filler - done) for done in range(0, filler, length)]
        places = torch.arange(filler, device=self.positions.device) % length + begin
        holes = self.spans[segment] - keys[segment]

        def extend(x: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
            return None if x is None else torch.cat([x, values])

        return self.of_segments(
            [*queries, *lengths],
            [*keys, *lengths],
            batch_shape=self.batch_shape,
            real_index=self.real_index,
            source=self.source,
            packed_index=extend(self.packed_index, self.packed_index[places]),
            positions=extend(self.positions, self.positions[places]),
            key_index=extend(self.key_index, torch.arange(filler, device=places.device) + len(self.indexed_positions)),
            spans=(*self.spans, *(n + holes for n in lengths)),
            key_source_positions=extend(self.key_source_positions, self.positions[places]),
            filler=filler + (self.filler or 0),
        )

    def packed_index_of(self, flat_index: torch.Tensor) -> torch.Tensor:
        """
        Packed tokens that compute the real tokens at `flat_index` (`row * L + column` in the padded batch).

        Args:
            flat_index (`torch.Tensor` of shape `(n,)`):
                Indices of real tokens. For the index of a masked token the result is any packed token; this is not
                checked.

        Returns:
            `torch.Tensor` of shape `(n,)`.

        Example:

        ```python
        >>> import torch
        >>> from trl_padfix import padding_free_layout

        >>> layout = padding_free_layout(torch.tensor([[0, 1, 1], [1, 1, 1]]))
        >>> layout.packed_index_of(torch.tensor([2, 3]))
        tensor([1, 2])

        ```
        """
        # In range for any index: an index out of range would stop the CUDA context with an error that names no line.
        rank = torch.searchsorted(self.real_index, flat_index).clamp(max=self.real_tokens - 1)
        return rank if self.source is None else self.source[rank]

    def dense_mask(self) -> torch.Tensor:
        """
        The attention mask that the segments describe, written out; for tests and readers, not for computing.

        Returns:
            `torch.Tensor` of shape `(T, T)`, bool: `True` where the packed token of the row sees the token of the
            column. If `key_index` indexes other tokens than the packed ones, the columns are these tokens.

        Example: the rows 1-2-3 and 1-5; the packed row is 1-2-3-5.

        ```python
        >>> import torch
        >>> from trl_padfix import prefix_sharing_layout

        >>> ids = torch.tensor([[1, 2, 3], [1, 5, 0]])
        >>> prefix_sharing_layout(ids, (ids > 0).long()).dense_mask().int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 1, 1, 0],
                [1, 0, 0, 1]], dtype=torch.int32)

        ```
        """
        mask = self.positions.new_zeros(self.packed_tokens, len(self.indexed_positions), dtype=torch.bool)
        keys = torch.arange(self.packed_tokens) if self.key_index is None else self.key_index
        end = 0
        for queries, path in zip(self.queries.lengths, keys.split(self.keys.lengths), strict=True):
            end += queries
            for n in range(queries):
                # Aligned to the bottom right: the last query sees the whole path, the query before it one key less.
                mask[end - 1 - n, path[: len(path) - n]] = True
        return mask


def packed_length(tokens: int, multiple: int | Sequence[int]) -> int:
    """
    The length of a packed row of `tokens` with filler: a multiple, or the smallest of several lengths.

    Example:

    ```python
    >>> packed_length(100, 64), [packed_length(n, [64, 256]) for n in (60, 100, 300)]
    (128, [64, 256, 512])

    ```
    """
    lengths = [multiple] if isinstance(multiple, int) else multiple
    return next((n for n in lengths if n >= tokens), -(-tokens // lengths[-1]) * lengths[-1])


def pack(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """
    Gather the packed tokens of a padded batch into one row: flash-attn's `unpad_input`.

    With a layout that shares prefixes a shared token has one value, of the row that computes it. Pack only values that
    are equal in all rows that share the token: ids, positions and states, but not labels or weights of a row.

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
    require(torch.Tensor, x=x)
    if tuple(x.shape[:2]) != layout.batch_shape:
        raise ValueError(f"Cannot pack values of shape {tuple(x.shape)} with a layout of {layout.batch_shape}.")
    return x.flatten(0, 1).index_select(0, layout.packed_index).unsqueeze(0)


def unpack(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """
    Scatter packed values to a padded batch: flash-attn's `pad_input`.

    Padding becomes zero. The value of a shared token is copied to each of its rows: `unpack(pack(x))` differs from `x`
    where these rows have different values.

    Args:
        x (`torch.Tensor` of shape `(1, T, ...)`):
            Packed values.
        layout ([`Layout`]):
            Layout that the values were packed with.

    Returns:
        `torch.Tensor` of shape `(B, L, ...)`.

    Raises:
        ValueError: If `x` does not have the layout's `(1, T)`.
    """
    require(torch.Tensor, x=x)
    if tuple(x.shape[:2]) != (1, layout.packed_tokens):
        raise ValueError(
            f"Cannot unpack values of shape {tuple(x.shape)} with a layout of {layout.packed_tokens} packed tokens."
        )
    # Without the filler, which no row has.
    real = x[0, : layout.real_tokens] if layout.source is None else x[0].index_select(0, layout.source)
    if layout.real_tokens == layout.padded_tokens:
        return real.unflatten(0, layout.batch_shape)
    # In place: no graph needs the zeros, and a second padded batch would be the peak of memory.
    padded = real.new_zeros(layout.padded_tokens, *real.shape[1:])
    return padded.index_copy_(0, layout.real_index, real).unflatten(0, layout.batch_shape)


T = TypeVar("T")


def cu_seqlens_of(lengths: Iterable[int]) -> torch.Tensor:
    """
    Cumulative lengths, `(n + 1,)`, int32: the `cu_seqlens` of variable-length kernels.

    Example:

    ```python
    >>> cu_seqlens_of([2, 3])
    tensor([0, 2, 5], dtype=torch.int32)

    ```
    """
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def to_device_async(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to `device`. The host does not wait for a copy from host to device."""
    # Only copies from page-locked memory are asynchronous.
    if torch.device(device).type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class SegmentLengths:
    """
    Lengths of the segments of a packed row, on the host and on the device of the row.

    Attributes:
        lengths (`tuple[int, ...]` of length `S`):
            The lengths.
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`, int32):
            Cumulative lengths: where each segment begins, and where the last one ends.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> SegmentLengths:
        """The same lengths on the host and on `device`, for which the host does not wait."""
        return cls(tuple(lengths), to_device_async(cu_seqlens_of(lengths), device))

    @cached_property
    def longest(self) -> int:
        """Length of the longest segment: flash-attn's `max_seqlen`."""
        return max(self.lengths)


def move_maps(value: T, device: torch.device | str) -> T:
    """
    A dataclass, or a dictionary of dataclasses, with its index maps (vectors of integers) on `device`.

    All maps move in one transfer, for which the host never waits. A map that occurs twice is one tensor again.

    Example:

    ```python
    >>> import torch

    >>> move_maps({"a": torch.tensor([3, 4]), "b": torch.tensor([5], dtype=torch.int32)}, "cpu")
    {'a': tensor([3, 4]), 'b': tensor([5], dtype=torch.int32)}

    ```
    """
    maps: dict[int, torch.Tensor] = {}
    # By identity: the `cu_seqlens` of queries and keys may be one tensor, and must stay one.
    _replace_tensors(value, lambda x: maps.setdefault(id(x), x))
    block = to_device_async(torch.cat([x.to(torch.int64) for x in maps.values()]), device)
    sections = block.split([x.numel() for x in maps.values()])
    moved = {i: section.to(x.dtype) for (i, x), section in zip(maps.items(), sections, strict=True)}
    return _replace_tensors(value, lambda x: moved[id(x)])


def _replace_tensors(value: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in the fields of dataclasses and the values of dictionaries, at any depth."""
    if isinstance(value, torch.Tensor):
        return by(value)
    if isinstance(value, dict):
        return {k: _replace_tensors(v, by) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _replace_tensors(vars(value)[f.name], by) for f in fields(value)})
    return value
