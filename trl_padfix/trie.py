"""The trie of prefix sharing: rows sorted, and the prefix of each that a row before it has computed already."""

from __future__ import annotations

import torch


__all__ = ["merge_prefixes"]


def merge_prefixes(
    row_R: torch.Tensor, depth_R: torch.Tensor, keys_RC: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Sort the rows and merge their common prefixes.

    Returns:
        `rank` (`(B,)`, the place of each row in sorted order), `shared` (`(B,)`, in sorted order: tokens that a row
        shares with the rows before it) and `packed_BM` (`(B, M)`, in sorted order: the packed token at each depth).
    """
    B, M = lengths.numel(), int(lengths.max())
    keys_BMC = keys_RC.new_full((B, M, keys_RC.shape[1]), torch.iinfo(torch.int64).min)
    keys_BMC[row_R, depth_R] = keys_RC
    order = keys_BMC.flatten(1).unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    rank = order.argsort()

    # In sorted order a row shares with all rows before it what it shares with the one just before it.
    sorted_BMC = keys_BMC[order]
    agree = (sorted_BMC[1:] == sorted_BMC[:-1]).all(-1).long().cumprod(1).sum(1)
    shared = torch.cat([agree.new_zeros(1), agree]).minimum(lengths[order])
    new = lengths[order] - shared
    offset = new.cumsum(0) - new

    # The token of row `i` at depth `t` was new in the last row up to `i` that did not share depth `t`.
    depth_M = torch.arange(M)
    owner_BM = torch.where(depth_M >= shared[:, None], torch.arange(B)[:, None], 0).cummax(0).values
    return rank, shared, (offset - shared)[owner_BM] + depth_M
