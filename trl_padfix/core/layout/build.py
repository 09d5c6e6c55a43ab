"""The three functions that build a layout, with the checks of their arguments."""

from __future__ import annotations

from itertools import accumulate

import torch

from ..errors import UnpackableBatchError
from .layout import Layout
from .prefix_tree import sort_by_keys, source_of_real_tokens


__all__ = ["lay_out", "packed_layout", "padding_free_layout", "prefix_sharing_layout"]


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
    Layout of a packed batch: each row holds several sequences, one after the other, without padding.

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
    empty = (~is_real_BL.any(1)).nonzero().flatten().tolist()
    if empty:
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
