"""The three ways to make a layout, with the checks of what it is made from."""

from __future__ import annotations

from itertools import accumulate

import torch

from .layout import Layout
from .prefix_tree import sort_by_keys, source_of_real_tokens


__all__ = ["packed_layout", "padding_free_layout", "prefix_sharing_layout"]


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
    if position_ids.dim() != 2:
        raise ValueError(
            f"Positions of shape {tuple(position_ids.shape)} do not say where the sequences of a packed row begin; "
            "that takes `(B, L)`."
        )
    if input_ids is not None and (input_ids.shape, input_ids.device) != (position_ids.shape, position_ids.device):
        raise ValueError(
            f"Token ids of shape {tuple(input_ids.shape)} on {input_ids.device} and positions of shape "
            f"{tuple(position_ids.shape)} on {position_ids.device} must have one shape `(B, L)` and lie on one device."
        )
    given = [position_ids] if input_ids is None else [position_ids, input_ids]
    given_BL = torch.stack([x.to(torch.int64) for x in given]).cpu()
    B, L = position_ids.shape
    if cu_seqlens is None:
        begins = given_BL[0].diff(dim=1, prepend=given_BL[0, :, :1]) != 1
    else:
        begins = torch.zeros(B, L, dtype=torch.bool)
        begins.view(-1)[_begins(cu_seqlens, B * L)] = True
    begins[:, 0] = True  # no sequence goes on in the next row
    place = torch.arange(B * L)
    first = begins.flatten().nonzero().squeeze(1)
    lengths = first.diff(append=torch.tensor([B * L]))
    position = place - first.repeat_interleave(lengths)
    keys = [] if input_ids is None else [x.flatten() for x in given_BL]
    return _lay_out((B, L), place, position, lengths.tolist(), keys).to(position_ids.device)


def _build(mask: torch.Tensor, keys: list[torch.Tensor]) -> Layout:
    """The layout of `mask`, with rows that agree in all `keys` shared; without keys nothing is shared."""
    if mask.dim() != 2:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}; removing padding needs `(B, L)`, 1 for real tokens "
            "and 0 for padding. Pass the two-dimensional mask that the tokenizer or collator made."
        )
    given = [mask, *keys]
    if mask.device.type != "cpu":  # one copy to the host, and so one synchronisation, for all that is read
        given = list(torch.stack([x.to(torch.int64) for x in given]).cpu())
    kept_BL, (B, L) = _kept(mask, given[0]), mask.shape
    real_index, lengths = kept_BL.flatten().nonzero().squeeze(1), kept_BL.sum(1)
    begins = torch.arange(B) * L + kept_BL.int().argmax(1)
    position_R = real_index - begins.repeat_interleave(lengths)
    keys_R = [key.flatten()[real_index] for key in given[1:]]
    if keys_R and not torch.equal(position_R[lengths.cumsum(0) - 1] + 1, lengths):
        keys_R.insert(0, position_R)  # only of rows with holes are the positions not 0, 1, 2, ...
    return _lay_out((B, L), real_index, position_R, lengths.tolist(), keys_R).to(mask.device)


def _kept(mask: torch.Tensor, on_host: torch.Tensor) -> torch.Tensor:
    """Where tokens are real, `(B, L)`, bool; a `ValueError` for other values than 0 and 1 and for empty rows."""
    kept_BL = on_host != 0
    if mask.is_floating_point() or not kept_BL.numel() or not torch.equal(on_host, kept_BL.to(on_host.dtype)):
        values = mask.flatten().unique()[:5].tolist()
        if not values or not set(values) <= {0, 1}:
            raise ValueError(
                f"The attention mask of shape {tuple(mask.shape)} and dtype {mask.dtype} holds {values}; removing "
                "padding needs 1 for real tokens and 0 for padding. Additive and weighted masks cannot be packed."
            )
    empty = (~kept_BL.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"Rows {empty} of the attention mask hold no real token, so there is nothing to compute for them and no "
            "defined result. Drop these rows from the batch, or keep at least one token of each."
        )
    return kept_BL


def _begins(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Where sequences begin, on the host; raises a `ValueError` for bounds that do not ascend from 0 to `tokens`."""
    bounds = cu_seqlens.cpu()
    whole = bounds.dim() == 1 and bounds.dtype in (torch.int16, torch.int32, torch.int64) and len(bounds) > 1
    if not whole or bounds[0] != 0 or bounds[-1] != tokens or (bounds.diff() < 0).any():
        raise ValueError(
            f"`cu_seqlens` of dtype {cu_seqlens.dtype} is {bounds.flatten()[:9].tolist()}; the bounds of sequences in "
            f"a batch of {tokens} tokens are whole numbers that ascend from 0 to {tokens}."
        )
    return bounds.long()[bounds < tokens]


def _lay_out(
    batch_shape: tuple[int, int],
    real_index: torch.Tensor,
    position_R: torch.Tensor,
    lengths: list[int],
    keys_R: list[torch.Tensor],
) -> Layout:
    """
    The layout of the real tokens of sequences of `lengths`, one behind the other, on the host.

    Sequences that agree in all `keys_R` are shared; without keys none are.
    """
    begins = [0, *accumulate(lengths)][:-1]
    segments = [(begin, 0, length) for begin, length in zip(begins, lengths, strict=True)]
    source, packed_index, positions = None, real_index, position_R
    if keys_R:
        rows = [(begins[row], own, lengths[row]) for row, own in zip(*sort_by_keys(keys_R, lengths), strict=True)]
        source = source_of_real_tokens(rows, len(real_index))
        # A row that another one begins with, or is, may have no token of its own: then it has no segment.
        segments = [(begin, own, length) for begin, own, length in rows if length > own]
        packed_index, positions = (
            torch.cat([x[begin + own : begin + n] for begin, own, n in segments]) for x in (real_index, position_R)
        )
    queries, keys = [n - own for _, own, n in segments], [n for *_, n in segments]
    key_index = None
    if source is not None and queries != keys:
        key_index = torch.cat([source[begin : begin + n] for begin, _, n in segments])
    return Layout.of_segments(
        queries,
        keys,
        batch_shape=batch_shape,
        real_index=real_index,
        source=source,
        packed_index=packed_index,
        positions=positions,
        key_index=key_index,
        spans=tuple((positions[torch.tensor(queries).cumsum(0) - 1] + 1).tolist()),
    )
