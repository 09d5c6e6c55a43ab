"""The trie of prefix sharing: rows sorted, and the prefix of each that a row before it has computed already."""

from __future__ import annotations

from itertools import accumulate

import torch


__all__ = ["merge_prefixes"]


def merge_prefixes(keys_RC: torch.Tensor, lengths: list[int]) -> tuple[dict[int, slice], dict[int, torch.Tensor]]:
    """
    Sort the rows and merge their common prefixes.

    Args:
        keys_RC (`torch.Tensor` of shape `(R, C)`):
            What each real token is told apart by, row after row.
        lengths (`list[int]`):
            Real tokens of each row.

    Returns:
        By row, in sorted order: the real tokens that no row before it has, and the packed tokens of the whole row.
    """
    keys, each = keys_RC.flatten().numpy(), keys_RC.shape[1]
    ends = list(accumulate(lengths))
    rows = [keys[each * (end - length) : each * end] for end, length in zip(ends, lengths, strict=True)]
    new, paths, begin = {}, {}, 0
    before, path = keys[:0], torch.empty(0, dtype=torch.int64)
    # Big-endian numbers are ordered as their bytes are.
    for row in sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes()):
        # In sorted order a row shares with all rows before it what it shares with the one just before it.
        most = min(len(before), len(rows[row]))
        differ = rows[row][:most] != before[:most]
        shared = int(differ.argmax() if differ.any() else most) // each
        new[row] = slice(ends[row] - lengths[row] + shared, ends[row])
        path = torch.cat([path[:shared], torch.arange(begin, begin + lengths[row] - shared)])
        paths[row], before, begin = path, rows[row], begin + lengths[row] - shared
    return new, paths
