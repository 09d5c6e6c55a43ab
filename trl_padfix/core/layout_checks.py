"""Checks of what layouts are made from: masks, and the bounds of sequences in packed rows."""

from __future__ import annotations

import numpy as np
import torch


__all__ = ["check_mask", "check_positions", "check_two_dimensional", "checked_bounds"]


def check_two_dimensional(mask: torch.Tensor) -> None:
    """
    Raises:
        ValueError: If an attention mask is not `(B, L)`.
    """
    if mask.dim() != 2:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)}; removing padding needs `(B, L)`, 1 for real tokens "
            "and 0 for padding. Pass the two-dimensional mask that the tokenizer or collator made."
        )


def check_positions(position_ids: torch.Tensor, input_ids: torch.Tensor | None) -> None:
    """
    Raises:
        ValueError: If positions are not `(B, L)`, or ids are not like them.
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


def check_mask(given: torch.Tensor, mask_BL: torch.Tensor) -> np.ndarray:
    """
    Check an attention mask.

    Args:
        given (`torch.Tensor`):
            The mask, as it was given.
        mask_BL (`torch.Tensor` of shape `(B, L)`):
            The same on the host.

    Returns:
        `np.ndarray` of shape `(B, L)`, bool: where tokens are real.

    Raises:
        ValueError: If it holds other values than 0 and 1, or has a row without a real token.
    """
    whole = not given.is_floating_point() and mask_BL.numel() > 0
    # The bits of all numbers together: one pass says whether any is negative or more than 1.
    if not whole or int(np.bitwise_or.reduce(mask_BL.contiguous().view(-1).numpy())) not in (0, 1):
        values = given.flatten().unique()[:5].tolist()
        if mask_BL.numel() == 0 or not set(values) <= {0, 1}:
            raise ValueError(
                f"The attention mask of shape {tuple(given.shape)} and dtype {given.dtype} holds {values}; removing "
                "padding needs 1 for real tokens and 0 for padding. Additive and weighted masks cannot be packed."
            )
    kept_BL = mask_BL.numpy() != 0 if whole else (mask_BL != 0).numpy()
    empty = np.flatnonzero(~kept_BL.any(1)).tolist()
    if empty:
        raise ValueError(
            f"Rows {empty} of the attention mask hold no real token, so there is nothing to compute for them and no "
            "defined result. Drop these rows from the batch, or keep at least one token of each."
        )
    return kept_BL


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
