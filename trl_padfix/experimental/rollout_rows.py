"""
The prefix tree of rollout samples, in place of TRL's trie of Python dictionaries.

TRL builds the tree of each row token by token, on the process that all GPUs wait for. Here samples are compared as
bytes. The rows, the budget and the packed row are TRL's, token for token.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch
import trl.experimental.async_grpo.async_grpo_trainer as trl_async
from trl.experimental.async_grpo.packing import TreeRow

from ..core.layout.prefix_tree import common_bytes


__all__ = ["FixedCountBatcher", "RolloutRow", "TokenBudgetBatcher"]

WIDTH = 4
"""Bytes of a token id. Big-endian numbers sort as bytes as they do as numbers."""


class RolloutRow(TreeRow):
    """
    TRL's [`~trl.experimental.async_grpo.packing.TreeRow`] with the samples in sorted order instead of a trie.

    A token of TRL's trie is shared if the next token is the same too: of two samples with `n` tokens in common,
    `n - 1` are shared, and all of them only if the samples are equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sorted: list[tuple[bytes, int]] = []  # the distinct samples and their numbers, in order
        self.tokens = range(0)  # type: ignore[assignment]  # only its length is read

    def _shared(self, content: bytes) -> int:
        """Number of tokens of a sample that are in the tree already."""
        place = bisect_left(self._sorted, (content, -1))
        neighbours = [row for row, _ in self._sorted[max(place - 1, 0) : place + 1]]
        if content in neighbours:
            return len(content) // WIDTH
        # In sorted order no sample shares more with this one than its neighbours do.
        common = max((common_bytes(content, row) // WIDTH for row in neighbours), default=0)
        return max(common - 1, 0)

    def fits(self, sample: dict[str, Any], budget: int) -> bool:
        content = _content(sample)
        new = len(content) // WIDTH - self._shared(content)
        return len(self.tokens) + new <= budget and self.trained + int(sample["completion_mask"].sum()) <= budget

    def add(self, sample: dict[str, Any]) -> None:
        content = _content(sample)
        length, shared = len(content) // WIDTH, self._shared(content)
        if shared < length:
            insort(self._sorted, (content, len(self.samples)))
        self.tokens = range(len(self.tokens) + length - shared)  # type: ignore[assignment]
        # The cost of a token is the length of its path: the sum of `shared + 1` to `length`.
        self.load += (length * (length + 1) - shared * (shared + 1)) // 2
        self.samples.append(sample)
        self.groups.add(sample["group_id"])
        self.trained += int(sample["completion_mask"].sum())

    def pack(self) -> dict[str, torch.Tensor]:
        """The packed row: tokens node by node, the path of each node as its keys (`tree_*`), and the loss terms."""
        ids, positions, starts, paths, path_of = [], [], [0], [], {}
        lengths = [len(content) // WIDTH for content, _ in self._sorted]
        common = [common_bytes(a, b) // WIDTH for (a, _), (b, _) in pairwise(self._sorted)]
        shared = np.array([0, *(max(n - 1, 0) for n in common)])
        numbers = np.array([number for _, number in self._sorted])
        # Samples `first` to `last` of the sorted ones have the path `path` in common, which ends at `depth`.
        stack = [(0, len(lengths), 0, np.arange(0))]
        while stack:
            first, last, depth, path = stack.pop()
            end = lengths[first] if last - first == 1 else int(shared[first + 1 : last].min())
            if end > depth:
                ids.append(np.asarray(self.samples[numbers[first]]["input_ids"])[depth:end])
                positions.append(np.arange(depth, end))
                path = np.concatenate([path, np.arange(starts[-1], starts[-1] + end - depth)])
                starts.append(starts[-1] + end - depth)
                paths.append(path)
            if last - first == 1:
                path_of[self._sorted[first][0]] = path
                continue
            cuts = [first, *(first + 1 + np.flatnonzero(shared[first + 1 : last] == end)).tolist(), last]
            # TRL's order of branches is that of their first samples. Reversed, because the stack is read from its end.
            branches = sorted(pairwise(cuts), key=lambda b: -int(numbers[b[0] : b[1]].min()))
            stack += [(begin, stop, end, path) for begin, stop in branches]
        row = {
            "input_ids": np.concatenate(ids),
            "position_ids": np.concatenate(positions),
            "tree_kv_index": np.concatenate(paths),
            "tree_cu_seqlens_q": np.array(starts, dtype=np.int32),
            "tree_cu_seqlens_k": np.cumsum([0, *map(len, paths)], dtype=np.int32),
            "tree_max_seqlens": np.array([np.diff(starts).max(), max(map(len, paths))]),
        }
        row |= self._terms(row["input_ids"], path_of)
        packed = {name: torch.from_numpy(values) for name, values in row.items()}
        # Not TRL's: the tokens of the samples before any is shared, for our token counts.
        return packed | {"sample_lengths": torch.tensor([len(sample["input_ids"]) for sample in self.samples])}

    def _terms(self, row_ids: np.ndarray, path_of: dict[bytes, np.ndarray]) -> dict[str, np.ndarray]:
        """The loss terms: one for each trained token of each sample, at the token before it."""
        labels, terms = np.full(len(row_ids), -100, dtype=np.int64), []
        for number, sample in enumerate(self.samples):
            trained = np.flatnonzero(np.asarray(sample["completion_mask"])[1:]) + 1
            index = path_of[_content(sample)][trained - 1]
            labels[index] = np.asarray(sample["input_ids"])[trained]
            advantages = np.full(len(trained), sample["advantage"], dtype=np.float32)
            old = np.asarray(sample["old_log_probs"], dtype=np.float32)[trained]
            terms.append((index, old, advantages, np.full(len(trained), number)))
        names = ("token_index", "old_log_probs", "advantages", "segment_id")
        columns = (np.concatenate(column) for column in zip(*terms, strict=True))
        return {"shift_labels": labels} | dict(zip(names, columns, strict=True))


def _content(sample: dict[str, Any]) -> bytes:
    """The token ids of a sample as bytes, which sort like the ids."""
    return np.asarray(sample["input_ids"]).astype(f">i{WIDTH}").tobytes()


def _with_our_rows(method: Any) -> Any:
    """A copy of a method of TRL that makes our rows. Its globals are a copy, too: TRL's module stays unchanged."""
    return FunctionType(
        method.__code__, method.__globals__ | {"TreeRow": RolloutRow}, method.__name__, method.__defaults__
    )


class FixedCountBatcher(trl_async.FixedCountBatcher):
    """TRL's batcher with our rows."""

    __iter__ = _with_our_rows(trl_async.FixedCountBatcher.__iter__)


class TokenBudgetBatcher(trl_async.TokenBudgetBatcher):
    """TRL's batcher with our rows."""

    __iter__ = _with_our_rows(trl_async.TokenBudgetBatcher.__iter__)
