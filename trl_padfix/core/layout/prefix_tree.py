"""
The prefix tree: rows in sorted order, with the number of tokens that each shares with the row before it.

Rows are compared as bytes, and the path of a shared prefix is copied from the row before: time and memory are linear
in the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch


__all__ = ["common_bytes", "sort_by_keys", "sort_rows", "source_of_real_tokens"]


class SortedRows(NamedTuple):
    """
    Rows in sorted order.

    Attributes:
        order (`list[int]`): Row numbers, sorted by the content of the rows.
        shared (`list[int]`): Tokens that each sorted row has in common with the one before: an LCP array.
    """

    order: list[int]
    shared: list[int]


def sort_by_keys(keys_R: list[torch.Tensor], lengths: list[int]) -> SortedRows:
    """
    Sort rows by the keys that identify their tokens.

    In sorted order the row just before has the longest shared prefix of all rows before.

    Args:
        keys_R (`list` of `torch.Tensor` of shape `(R,)`):
            Keys of the tokens of all rows, one row after the other. Tokens are equal if all their keys are.
        lengths (`list[int]`):
            Tokens of each row.

    Returns:
        [`SortedRows`].

    Example: the rows 1-2-3-4, 1-6 and 1-2-5 in the order 1-2-3-4, 1-2-5, 1-6.

    ```python
    >>> import torch

    >>> sort_by_keys([torch.tensor([1, 2, 3, 4, 1, 6, 1, 2, 5])], [4, 2, 3])
    SortedRows(order=[0, 2, 1], shared=[0, 2, 1])

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


def sort_rows(rows: Sequence[bytes], width: int) -> SortedRows:
    """[`sort_by_keys`] for rows that are bytes already, `width` bytes for each token."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    pairs = pairwise(rows[row] for row in order)
    # Equal bytes may end within a token; the floor division drops such a part.
    return SortedRows(order, [0] * bool(order) + [common_bytes(before, row) // width for before, row in pairs])


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
