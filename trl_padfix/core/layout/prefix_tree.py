"""
The trie of prefix sharing: rows sorted, and the prefix of each that a row before it has computed already.

Rows are compared as bytes and paths copied from the row before: time and memory are linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch


__all__ = ["SortedRows", "common_bytes", "sort_by_keys", "sort_rows", "source_of_real_tokens"]


class SortedRows(NamedTuple):
    """Rows, sorted, and how many tokens each of them begins with that the row before it has too."""

    order: list[int]
    shared: list[int]


def sort_by_keys(keys_R: list[torch.Tensor], lengths: list[int]) -> SortedRows:
    """
    Sort rows of `lengths` by the keys that identify their tokens, each key `(R,)`.

    In sorted order a row shares with all rows before it what it shares with the one just before it.
    """
    keys = np.stack([key.numpy() for key in keys_R], axis=1)
    # Big-endian numbers, whose bytes sort as they do. The bits of all numbers together: one pass says whether 32 bits
    # hold them, and none is negative.
    keys = keys.astype(">i4" if 0 <= int(np.bitwise_or.reduce(keys, axis=None)) < 2**31 else ">i8")
    width = keys.itemsize * len(keys_R)
    bounds = [0, *(width * np.cumsum(lengths)).tolist()]
    every = keys.tobytes()
    return sort_rows([every[begin:end] for begin, end in pairwise(bounds)], width)


def sort_rows(rows: Sequence[bytes], width: int) -> SortedRows:
    """[`sort_by_keys`] of rows that are bytes already, `width` of them for each token."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    pairs = pairwise(rows[row] for row in order)
    return SortedRows(order, [0] * bool(order) + [common_bytes(before, row) // width for before, row in pairs])


def common_bytes(left: bytes, right: bytes) -> int:
    """How many bytes `left` and `right` begin with in common."""
    most = min(len(left), len(right))
    one, other = (np.frombuffer(x, dtype=np.uint8, count=most) for x in (left, right))
    parted = np.flatnonzero(one != other)
    return int(parted[0]) if len(parted) else most


def source_of_real_tokens(rows: list[tuple[int, int, int]], tokens: int) -> torch.Tensor:
    """
    The packed token that computes each real token, `(R,)`.

    `rows` are sorted: where each begins among the real tokens, how many tokens it shares, and its length.
    """
    source = np.empty(tokens, dtype=np.int64)
    before = packed = 0
    for begin, own, length in rows:
        source[begin : begin + own] = source[before : before + own]
        source[begin + own : begin + length] = np.arange(packed, packed + length - own)
        before, packed = begin, packed + length - own
    return torch.from_numpy(source)
