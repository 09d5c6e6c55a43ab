"""
The functions that build a layout, with the checks of their arguments.

All of them call [`lay_out`]. With prefix sharing it sorts the rows, and counts the tokens that each shares with the
row before it. Rows are compared as bytes, and the path of a shared prefix is copied from the row before: time and
memory are linear in the number of tokens.

[`tree_layout`] reads a prefix tree in the form of TRL's asynchronous GRPO, the `tree_*` keyword arguments of a
forward. A tree row has `N` tokens and `S` segments. Its keywords describe what a [`Layout`] describes:
`tree_cu_seqlens_q` the queries of each segment, `tree_kv_index` its keys (the path from the root, own tokens last),
and `tree_cu_seqlens_k` where the keys of each segment begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from ..errors import PaddingRemovalError, UnpackableBatchError, require
from .layout import Layout


__all__ = [
    "common_bytes", "lay_out", "packed_layout", "padding_free_layout", "prefix_sharing_layout", "sort_by_keys",
    "sort_rows", "source_of_real_tokens", "tree_arguments_in", "tree_layout",
]  # fmt: skip


def padding_free_layout(attention_mask: torch.Tensor) -> Layout:
    """
    Layout that drops the padding of a batch and keeps every real token.

    Args:
        attention_mask (`torch.Tensor` of shape `(B, L)`):
            1 for real tokens, 0 for padding, anywhere: left, right, both ends, holes.

    Returns:
        [`Layout`] on the mask's device. Costs one device synchronization.

    Raises:
        ValueError: If the mask is not two-dimensional, holds other values than 0 and 1, or has a row without a real
            token.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import pack, padding_free_layout, unpack

    >>> layout = padding_free_layout(torch.tensor([[0, 1, 1], [1, 1, 1]]))
    >>> packed = pack(torch.tensor([[9, 5, 6], [5, 6, 7]]), layout)
    >>> packed  # (1, T)
    tensor([[5, 6, 5, 6, 7]])
    >>> unpack(packed, layout)  # (B, L), zeros at padding
    tensor([[0, 5, 6],
            [5, 6, 7]])
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

    Two tokens are computed once if their rows have the same ids at the same positions in all real tokens up to and
    including these two. In a causal decoder such tokens have the same hidden states.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`):
            Token ids.
        attention_mask (`torch.Tensor` of shape `(B, L)`):
            1 for real tokens, 0 for padding.
        position_ids (`torch.Tensor` of shape `(B, L)` or `(P, B, L)`, *optional*):
            Positions that the decoder gets, if it gets any. Tokens with different positions are never shared.

    Returns:
        [`Layout`] on the mask's device. Costs one device synchronization.

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
    >>> layout.queries.lengths, layout.keys.lengths
    ((4, 1), (4, 3))

    ```
    """
    require(torch.Tensor, input_ids=input_ids, attention_mask=attention_mask)
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
    Layout of a pre-packed batch: each row holds several sequences, one after the other, without padding.

    Args:
        position_ids (`torch.Tensor` of shape `(B, L)`):
            A sequence begins at the first token of each row, and at each token whose position is not the position
            before it plus 1.
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`, *optional*):
            Where the sequences begin and end in the flattened batch. By default read from the positions.
        input_ids (`torch.Tensor` of shape `(B, L)`, *optional*):
            If given, sequences share prefixes of the same ids at the same positions.

    Returns:
        [`Layout`] on the device of the positions. Costs one device synchronization.

    Raises:
        ValueError: If the positions are not two-dimensional, `input_ids` has another shape or device, or `cu_seqlens`
            is not ascending integers from 0 to `B * L`.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import packed_layout

    >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
    >>> packed_layout(positions).queries.lengths
    (3, 2)
    >>> packed_layout(positions, input_ids=torch.tensor([[5, 6, 7, 5, 6]])).packed_tokens
    3

    ```
    """
    if position_ids.dim() != 2:
        raise ValueError(
            f"Positions of shape {tuple(position_ids.shape)} do not show where the sequences of a packed row begin. "
            "Pass positions of shape `(B, L)`."
        )
    if input_ids is not None and (input_ids.shape, input_ids.device) != (position_ids.shape, position_ids.device):
        raise ValueError(
            f"Token ids of shape {tuple(input_ids.shape)} on {input_ids.device} and positions of shape "
            f"{tuple(position_ids.shape)} on {position_ids.device} must have one shape `(B, L)` and lie on one device."
        )
    tensors = [position_ids] if input_ids is None else [position_ids, input_ids]
    keys_BL = torch.stack([x.to(torch.int64) for x in tensors]).cpu()  # one copy, one synchronization
    B, L = position_ids.shape
    if cu_seqlens is None:
        begins = keys_BL[0].diff(dim=1, prepend=keys_BL[0, :, :1]) != 1
    else:
        begins = torch.zeros(B, L, dtype=torch.bool)
        begins.view(-1)[_begins(cu_seqlens, B * L)] = True
    begins[:, 0] = True  # no sequence continues in the next row
    index = torch.arange(B * L)
    first = begins.flatten().nonzero().squeeze(1)
    lengths = first.diff(append=torch.tensor([B * L]))
    # Counted from 0 in each sequence, for any number that its positions start with.
    position = index - first.repeat_interleave(lengths)
    keys = [] if input_ids is None else [x.flatten() for x in keys_BL]
    return lay_out((B, L), index, position, lengths.tolist(), keys).to(position_ids.device)


def _build(mask: torch.Tensor, keys: list[torch.Tensor]) -> Layout:
    """The layout of `mask`. Prefixes that agree in all `keys` are shared; without keys nothing is shared."""
    require(torch.Tensor, attention_mask=mask)
    if mask.dim() != 2:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}; removing padding needs `(B, L)`, 1 for real tokens "
            "and 0 for padding. Pass the two-dimensional mask that the tokenizer or collator made."
        )
    tensors = [mask, *keys]
    if mask.device.type != "cpu":  # all in one copy to the host: one synchronization
        tensors = list(torch.stack([x.to(torch.int64) for x in tensors]).cpu())
    is_real_BL, (B, L) = _is_real(mask, tensors[0]), mask.shape
    real_index, lengths = is_real_BL.flatten().nonzero().squeeze(1), is_real_BL.sum(1)
    begins = torch.arange(B) * L + is_real_BL.int().argmax(1)  # `argmax` returns the first of equal values
    position_R = real_index - begins.repeat_interleave(lengths)
    keys_R = [key.flatten()[real_index] for key in tensors[1:]]
    if keys_R and not torch.equal(position_R[lengths.cumsum(0) - 1] + 1, lengths):
        # A row has holes. Without holes positions are 0, 1, 2, ... in all rows, and need no comparison.
        keys_R.insert(0, position_R)
    return lay_out((B, L), real_index, position_R, lengths.tolist(), keys_R).to(mask.device)


def _is_real(mask: torch.Tensor, host_mask: torch.Tensor) -> torch.Tensor:
    """
    Whether each token is real, `(B, L)`, bool, on the host; `host_mask` is the copy of `mask` there.

    Raises:
        ValueError: For other values than 0 and 1, and for rows without a real token.
    """
    is_real_BL = host_mask != 0
    # A floating-point mask is read again from `mask`: its copy on the host may be cut to integers.
    is_binary = torch.equal(host_mask, is_real_BL.to(host_mask.dtype))
    if mask.is_floating_point() or not is_real_BL.numel() or not is_binary:
        values = mask.flatten().unique()[:5].tolist()
        if not values or not set(values) <= {0, 1}:
            raise UnpackableBatchError(
                "mask values",
                f"The attention mask of shape {tuple(mask.shape)} and dtype {mask.dtype} holds {values}; removing "
                "padding needs 1 for real tokens and 0 for padding. Additive and weighted masks cannot be packed.",
            )
    if empty := (~is_real_BL.any(1)).nonzero().flatten().tolist():
        raise UnpackableBatchError(
            "empty rows",
            f"Rows {empty} of the attention mask hold no real token, so there is nothing to compute for them and no "
            "defined result. Drop these rows from the batch, or keep at least one token of each.",
        )
    return is_real_BL


def _begins(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """First tokens of the sequences, on the host; a `ValueError` if `cu_seqlens` do not ascend from 0 to `tokens`."""
    ends = cu_seqlens.cpu()
    is_integer_vector = ends.dim() == 1 and ends.dtype in (torch.int16, torch.int32, torch.int64) and len(ends) > 1
    if not is_integer_vector or ends[0] != 0 or ends[-1] != tokens or (ends.diff() < 0).any():
        raise ValueError(
            f"`cu_seqlens` of dtype {cu_seqlens.dtype} is {ends.flatten()[:9].tolist()}; the bounds of sequences in "
            f"a batch of {tokens} tokens are whole numbers that ascend from 0 to {tokens}."
        )
    return ends.long()[ends < tokens]  # an empty sequence at the end has no first token


def lay_out(
    batch_shape: tuple[int, int],
    real_index: torch.Tensor,
    position_R: torch.Tensor,
    lengths: list[int],
    keys_R: list[torch.Tensor],
) -> Layout:
    """
    Build the layout on the host.

    Args:
        batch_shape (`tuple[int, int]`): `(B, L)`.
        real_index (`torch.Tensor` of shape `(R,)`): Flat index of each real token, sequence after sequence.
        position_R (`torch.Tensor` of shape `(R,)`): Position of each real token in its sequence.
        lengths (`list[int]`): Real tokens of each sequence.
        keys_R (`list` of `torch.Tensor` of shape `(R,)`): Values that identify a token, such as its id. Prefixes that
            agree in all of them are shared; if the list is empty, nothing is shared.

    Example: the rows 1-2-3-4 and 1-2-5 make the segments 1-2-3-4 and 5, with the keys 1-2-3-4 and 1-2-5.

    ```python
    >>> import torch

    >>> ids, positions = torch.tensor([1, 2, 3, 4, 1, 2, 5]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    >>> layout = lay_out((2, 4), torch.arange(7), positions, [4, 3], [ids])
    >>> layout.source
    tensor([0, 1, 2, 3, 0, 1, 4])
    >>> layout.packed_index, layout.key_index
    (tensor([0, 1, 2, 3, 6]), tensor([0, 1, 2, 3, 0, 1, 4]))
    >>> layout.queries.lengths, layout.keys.lengths
    ((4, 1), (4, 3))

    ```
    """
    begins = [0, *accumulate(lengths)][:-1]
    # First real token of each row, tokens that it shares with earlier segments, and its length.
    segments = [(begin, 0, length) for begin, length in zip(begins, lengths, strict=True)]
    source, packed_index, positions = None, real_index, position_R
    if keys_R:
        order, shared_lengths = sort_by_keys(keys_R, lengths)
        rows = [(begins[row], shared, lengths[row]) for row, shared in zip(order, shared_lengths, strict=True)]
        source = source_of_real_tokens(rows, len(real_index))
        # A row that equals another row, or the beginning of one, has no new tokens, and so no segment.
        segments = [(begin, shared, length) for begin, shared, length in rows if length > shared]
        packed_index, positions = (
            torch.cat([x[begin + shared : begin + n] for begin, shared, n in segments])
            for x in (real_index, position_R)
        )
    query_lengths, key_lengths = [n - shared for _, shared, n in segments], [n for *_, n in segments]
    key_index = None
    if source is not None and query_lengths != key_lengths:
        key_index = torch.cat([source[begin : begin + n] for begin, _, n in segments])
    return Layout.of_segments(
        query_lengths,
        key_lengths,
        batch_shape=batch_shape,
        real_index=real_index,
        source=source,
        packed_index=packed_index,
        positions=positions,
        key_index=key_index,
        spans=tuple((positions[torch.tensor(query_lengths).cumsum(0) - 1] + 1).tolist()),
    )


_TENSORS = ("tree_cu_seqlens_q", "tree_kv_index", "tree_cu_seqlens_k")
_SUPPORTED = {*_TENSORS, "tree_max_seqlen_q", "tree_max_seqlen_k"}  # the lengths follow from the tensors


def tree_arguments_in(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """
    The `tree_*` arguments of a call; empty if none is given.

    Raises:
        PaddingRemovalError: If one of them is unknown, or if some are missing.
    """
    tree = {k: v for k, v in arguments.items() if k.startswith("tree_") and v is not None}
    # Ignoring an argument would change the attention without notice, so another form of tree is an error.
    if unknown := sorted(tree.keys() - _SUPPORTED):
        raise PaddingRemovalError(
            f"The model was called with {unknown}. Trees are read from {sorted(_SUPPORTED)}, as TRL 1.16 passes them; "
            "another form might mean another tree. Pass these, or run this call inside `with handle.disabled():`."
        )
    if tree and not tree.keys() >= set(_TENSORS):
        raise PaddingRemovalError(
            f"The model was called with {sorted(tree)}, which is not a tree: {', '.join(_TENSORS)} are needed."
        )
    return tree


def tree_layout(tree: Mapping[str, Any], tokens: int, keys: Sequence[torch.Tensor] = ()) -> Layout:
    """
    Layout of a tree row: each segment attends to its path from the root.

    Args:
        tree (`Mapping[str, Any]`):
            The `tree_*` arguments of the call.
        tokens (`int`):
            Tokens of the row, `N`.
        keys (`Sequence` of `torch.Tensor` of shape `(N,)`, *optional*):
            Tokens with the same path are computed once if they agree in all keys (ids, positions). A tree of TRL forks
            one token before its samples differ, and has a copy of that token for each branch. Without keys every token
            of the row is computed.

    Returns:
        [`Layout`] with the batch shape `(1, N)`, on the device of `tree_cu_seqlens_q`. Costs one synchronization.

    Raises:
        ValueError: If the arguments do not describe a tree of `tokens` tokens.

    Example: 1-2-3 and 1-2-4, where the tree forks one token early: it has the token 2 twice.

    ```python
    >>> import torch

    >>> tree = {
    ...     "tree_cu_seqlens_q": torch.tensor([0, 1, 3, 5]),
    ...     "tree_cu_seqlens_k": torch.tensor([0, 1, 4, 7]),
    ...     "tree_kv_index": torch.tensor([0, 0, 1, 2, 0, 3, 4]),
    ... }
    >>> layout = tree_layout(tree, 5, [torch.tensor([1, 2, 3, 2, 4])])
    >>> layout.packed_index, layout.source
    (tensor([0, 1, 2, 4]), tensor([0, 1, 2, 1, 3]))
    >>> layout.queries.lengths, layout.keys.lengths
    ((3, 1), (3, 3))

    ```
    """
    device = tree["tree_cu_seqlens_q"].device
    tensors = [x.flatten().to(device=device, dtype=torch.int64) for x in (*(tree[name] for name in _TENSORS), *keys)]
    on_host = torch.cat(tensors).cpu().split([len(x) for x in tensors])  # in one copy: one synchronization
    cu_q, path_index, cu_k, *host_keys = on_host
    _check_cu_seqlens("tree_cu_seqlens_q", cu_q, tokens, "tokens of the row")
    _check_cu_seqlens("tree_cu_seqlens_k", cu_k, len(path_index), "entries of `tree_kv_index`")
    if len(cu_k) != len(cu_q):
        raise ValueError(f"`tree_cu_seqlens_q` has {len(cu_q)} entries and `tree_cu_seqlens_k` {len(cu_k)}.")
    parent = _parents_of_tokens(cu_q, path_index, cu_k)
    # A leaf is a segment whose last token no path continues. The paths to the leaves are the rows that the tree was
    # made of; a row that equals another row, or its beginning, has no leaf of its own.
    has_child = torch.zeros(tokens + 1, dtype=torch.bool)
    has_child[parent] = True  # a root has the parent -1, which sets the additional last entry
    leaves = (~has_child[cu_q[1:] - 1]).nonzero().flatten().tolist()
    paths = [path_index[cu_k[leaf] : cu_k[leaf + 1]] for leaf in leaves]
    token_R, lengths = torch.cat(paths), [len(path) for path in paths]
    position_R = torch.cat([torch.arange(length) for length in lengths])
    # Without keys a token is identified by its place in the row: the tree is kept unchanged.
    keys_R = [key[token_R] for key in host_keys] or [token_R]
    path_layout = lay_out((1, len(token_R)), torch.arange(len(token_R)), position_R, lengths, keys_R)
    assert path_layout.source is not None
    source = torch.empty(tokens, dtype=torch.int64)
    source[token_R] = path_layout.source  # one packed token computes a token of several paths
    layout = replace(
        path_layout,
        batch_shape=(1, tokens),
        real_index=torch.arange(tokens),
        source=source,
        packed_index=token_R[path_layout.packed_index],
    )
    return layout.to(device)


def _check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, end: int, unit: str) -> None:
    """Raise a `ValueError` unless `cu_seqlens` ascend from 0 to `end`, without empty segments."""
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or cu_seqlens[-1] != end or (cu_seqlens.diff() <= 0).any():
        raise ValueError(
            f"`{name}` is {cu_seqlens.tolist()[:9]}...{cu_seqlens.tolist()[-1:]}: the bounds of the segments ascend "
            f"from 0 to {end}, the {unit}. Padding of a collator (-1, 0) must be cut off before the forward."
        )


def _parents_of_tokens(cu_q: torch.Tensor, path_index: torch.Tensor, cu_k: torch.Tensor) -> torch.Tensor:
    """
    The token before each token on its path, `(N,)`; -1 for the first token of a path.

    Raises:
        ValueError: If a path does not end with its segment, or is not the path of the tokens on it.
    """
    tokens, lengths = int(cu_q[-1]), cu_q.diff()
    token = torch.arange(tokens)
    segment = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = cu_k[segment + 1] - (cu_q[segment + 1] - token)  # index in `path_index`, on the path of its own segment
    too_short = (cu_k.diff() < lengths).any()
    if too_short or not torch.equal(path_index[place.clamp(min=0)], token):
        raise ValueError(
            "A path of `tree_kv_index` does not end with the tokens of its segment, in their order. Attention is "
            "aligned to the bottom right: the last query of a segment is its last key."
        )
    before = path_index.roll(1)
    before[cu_k[:-1]] = -1
    parent = before[place]
    # This is a tree if each token has one parent, the same on all paths, and comes after it in the row.
    in_range = bool(((path_index >= 0) & (path_index < tokens)).all())
    if not in_range or (parent >= token).any() or not torch.equal(before, parent[path_index]):
        raise ValueError(
            "`tree_kv_index` holds paths that do not form a tree: on every path a token must follow the same tokens "
            "as on the path of its own segment, all at earlier places of the row."
        )
    return parent


def sort_by_keys(keys_R: list[torch.Tensor], lengths: list[int]) -> tuple[list[int], list[int]]:
    """
    Sort rows by the keys that identify their tokens.

    In sorted order the row just before has the longest shared prefix of all rows before.

    Args:
        keys_R (`list` of `torch.Tensor` of shape `(R,)`):
            Keys of the tokens of all rows, one row after the other. Tokens are equal if all their keys are.
        lengths (`list[int]`):
            Tokens of each row.

    Returns:
        `tuple[list[int], list[int]]`: the numbers of the rows in sorted order, and the tokens that each sorted row has
        in common with the one before (an LCP array).

    Example: the rows 1-2-3-4, 1-6 and 1-2-5 in the order 1-2-3-4, 1-2-5, 1-6.

    ```python
    >>> import torch

    >>> sort_by_keys([torch.tensor([1, 2, 3, 4, 1, 6, 1, 2, 5])], [4, 2, 3])
    ([0, 2, 1], [0, 2, 1])

    ```
    """
    keys = np.stack([key.numpy() for key in keys_R], axis=1)
    # The bytes of big-endian numbers sort as the numbers do. If the bitwise OR of all keys, one pass, is in
    # range, all fit into 31 bits and none is negative: then 4 bytes per key are enough.
    keys = keys.astype(">i4" if 0 <= int(np.bitwise_or.reduce(keys, axis=None)) < 2**31 else ">i8")
    width = keys.itemsize * len(keys_R)
    ends = (width * np.cumsum(lengths)).tolist()
    content = keys.tobytes()
    return sort_rows([content[begin:end] for begin, end in pairwise([0, *ends])], width)


def sort_rows(rows: Sequence[bytes], width: int) -> tuple[list[int], list[int]]:
    """[`sort_by_keys`] for rows that are bytes already, `width` bytes for each token."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    pairs = pairwise(rows[row] for row in order)
    # Equal bytes may end within a token; the floor division drops such a part.
    return order, [0] * bool(order) + [common_bytes(before, row) // width for before, row in pairs]


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix of two byte strings."""
    shorter = min(len(a), len(b))
    a_bytes, b_bytes = (np.frombuffer(x, dtype=np.uint8, count=shorter) for x in (a, b))
    differing = np.flatnonzero(a_bytes != b_bytes)
    return int(differing[0]) if len(differing) else shorter


def source_of_real_tokens(rows: list[tuple[int, int, int]], tokens: int) -> torch.Tensor:
    """
    Packed token that computes each real token: `Layout.source`.

    Args:
        rows (`list[tuple[int, int, int]]`):
            In sorted order, for each row: its first real token, the tokens that it shares with the row before in
            sorted order, and its length.
        tokens (`int`):
            Number of real tokens, `R`.

    Returns:
        `torch.Tensor` of shape `(R,)`.

    Example: 1-2-3-4, 1-6 and 1-2-5 stand one after the other. The packed tokens are 1-2-3-4, then 5, then 6.

    ```python
    >>> source_of_real_tokens([(0, 0, 4), (6, 2, 3), (4, 1, 2)], 9)
    tensor([0, 1, 2, 3, 0, 5, 0, 1, 4])

    ```
    """
    source = np.empty(tokens, dtype=np.int64)
    before = next_packed = 0
    for begin, shared, length in rows:
        # A copy of the row just before is enough: in sorted order no earlier row shares more with this one.
        source[begin : begin + shared] = source[before : before + shared]
        source[begin + shared : begin + length] = np.arange(next_packed, next_packed + length - shared)
        before, next_packed = begin, next_packed + length - shared
    return torch.from_numpy(source)
