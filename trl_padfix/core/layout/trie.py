"""
The trie of prefix sharing: rows sorted, and the prefix of each that a row before it has computed already.

Everything is made by whole slices of rows: rows are compared as bytes, paths are copied from the row before, and sums
over the places of a token follow from the order of the trie. Time and memory are linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch


__all__ = ["Trie", "common_bytes", "merge_prefixes", "places_by_token", "shared_paths", "sort_rows"]


class Trie(NamedTuple):
    """Rows, sorted, and how many tokens each of them begins with that the row before it has too."""

    order: list[int]
    shared: list[int]


def merge_prefixes(keys_R: list[torch.Tensor], lengths: list[int]) -> Trie:
    """
    Sort rows of `lengths` by the keys that identify their tokens, each key `(R,)`.

    In sorted order a row shares with all rows before it what it shares with the one just before it.
    """
    keys = _big_endian(keys_R)
    width = keys.itemsize * len(keys_R)
    ends = width * np.cumsum(lengths)
    begins = ends - width * np.asarray(lengths)
    every = keys.tobytes()
    return sort_rows([every[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)], width)


def sort_rows(rows: Sequence[bytes], width: int) -> Trie:
    """[`merge_prefixes`] of rows that are bytes already, `width` of them for each token."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    pairs = pairwise(rows[row] for row in order)
    return Trie(order, [0] * bool(order) + [common_bytes(before, row) // width for before, row in pairs])


def common_bytes(left: bytes, right: bytes) -> int:
    """How many bytes `left` and `right` begin with in common: a few are compared first, since most rows part early."""
    most = min(len(left), len(right))
    begin, size = 0, 256
    while begin < most:
        size = min(size, most - begin)
        if left[begin : begin + size] != right[begin : begin + size]:
            one, other = (np.frombuffer(x, dtype=np.uint8, count=size, offset=begin) for x in (left, right))
            return begin + int((one != other).argmax())
        begin, size = begin + size, 8 * size
    return most


def shared_paths(rows: list[tuple[int, int, int]], tokens: int) -> torch.Tensor:
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


def places_by_token(shared: list[int], key_lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The order in which to add what was gathered for the keys of the segments back to the tokens that they are: places
    among the keys sorted by token, `(n,)`, and where those of each token begin among them, `(T,)`, as
    `torch.nn.functional.embedding_bag` takes them. `shared` are the keys of each segment without its queries.

    The segments that have a token among their keys stand one behind the other, so the places of all tokens that the
    same segments have are a table: a line for each token, a column for each of these segments.
    """
    bounds = np.cumsum([0, *key_lengths])
    order = np.empty(bounds[-1], dtype=np.int64)
    counts = np.empty(sum(key_lengths) - sum(shared), dtype=np.int64)
    at = token = 0
    # For each segment the depths from which on fewer of the segments behind it have its tokens; deepest last.
    steps = _steps(shared, key_lengths)
    for segment, (own, length) in enumerate(zip(shared, key_lengths, strict=True)):
        begin = own
        for end, last in [*steps[segment], (length, segment)]:
            if end <= begin:
                continue
            tokens, segments = end - begin, last + 1 - segment
            table = order[at : at + tokens * segments].reshape(tokens, segments)
            np.add(bounds[segment : last + 1], np.arange(begin, end)[:, None], out=table)
            counts[token : token + tokens] = segments
            at, token, begin = at + table.size, token + tokens, end
    return torch.from_numpy(order), torch.from_numpy(np.cumsum(counts) - counts)


def _steps(shared: list[int], lengths: list[int]) -> list[list[tuple[int, int]]]:
    """
    Of each segment, ascending: up to which depth its tokens are keys up to which segment behind it.

    A token at depth `d` of a segment is a key of the next ones for as long as each shares more than `d`.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in shared]
    # Running minima of what the segments behind share, the smallest first, each with the last segment that has it.
    minima: list[tuple[int, int]] = []
    for segment in range(len(shared) - 1, -1, -1):
        own = shared[segment]
        found[segment] = [(depth, last) for depth, last in minima if depth > own]
        # For the segment before this one: nothing beyond `own` is common to it and those from here on.
        reach = segment
        while minima and minima[-1][0] >= own:
            reach = minima.pop()[1]
        if own:
            minima.append((own, max(reach, segment)))
    return found


def _big_endian(keys_R: list[torch.Tensor]) -> np.ndarray:
    """The keys of each token side by side, as big-endian numbers, whose bytes sort as they do."""
    keys = np.stack([key.numpy() for key in keys_R], axis=1)
    # The bits of all numbers together: one pass says whether 32 bits hold them, and none is negative.
    return keys.astype(">i4" if 0 <= int(np.bitwise_or.reduce(keys, axis=None)) < 2**31 else ">i8")
