"""Checks of what layouts are made from: masks, and the bounds of sequences in packed rows."""

from __future__ import annotations

import torch


__all__ = ["check_mask", "checked_bounds"]


def check_mask(given: torch.Tensor, mask_BL: torch.Tensor) -> None:
    """
    Check an attention mask.

    Args:
        given (`torch.Tensor`):
            The mask, as it was given.
        mask_BL (`torch.Tensor` of shape `(B, L)`):
            The same as whole numbers on the host.

    Raises:
        ValueError: If it holds other values than 0 and 1, or has a row without a real token.
    """
    if given.is_floating_point() or mask_BL.numel() == 0 or mask_BL.min() < 0 or mask_BL.max() > 1:
        values = given.flatten().unique()[:5].tolist()
        if mask_BL.numel() == 0 or not set(values) <= {0, 1}:
            raise ValueError(
                f"The attention mask of shape {tuple(given.shape)} and dtype {given.dtype} holds {values}; removing "
                "padding needs 1 for real tokens and 0 for padding. Additive and weighted masks cannot be packed."
            )
    empty = (mask_BL.sum(1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"Rows {empty} of the attention mask hold no real token, so there is nothing to compute for them and no "
            "defined result. Drop these rows from the batch, or keep at least one token of each."
        )


def checked_bounds(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """
    Where the sequences of a batch begin, on the host.

    Args:
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`):
            Bounds of the sequences, as variable-length kernels take them.
        tokens (`int`):
            Tokens of the batch.

    Raises:
        ValueError: If they do not ascend from 0 to `tokens` in whole numbers.
    """
    bounds = cu_seqlens.cpu()
    whole = bounds.dim() == 1 and bounds.dtype in (torch.int16, torch.int32, torch.int64) and len(bounds) > 1
    if not whole or bounds[0] != 0 or bounds[-1] != tokens or (bounds.diff() < 0).any():
        raise ValueError(
            f"`cu_seqlens` of dtype {cu_seqlens.dtype} is {bounds.flatten()[:9].tolist()}; the bounds of sequences in "
            f"a batch of {tokens} tokens are whole numbers that ascend from 0 to {tokens}."
        )
    return bounds.long()[bounds < tokens]
