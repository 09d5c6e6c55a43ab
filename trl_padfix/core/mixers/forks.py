"""
A layout as a tree, for recurrences and convolutions whose state forks where prefixes part.

The packed tokens are cut into nodes: runs of tokens between two forks. A node begins with the state in which its
parent ended. Nodes of one depth are a level; a recurrence computes level after level, all nodes of a level at once. A
short convolution needs no states, only the few tokens before each segment on its path.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..call.calls import PackedCall
from ..call.prefix_states import PrefixStates
from ..layout.layout import Layout
from .row_buckets import bucket_by_length


__all__ = ["Level", "NodeBlock", "NodeTree", "tree_of"]


@dataclass(frozen=True, eq=False)
class NodeBlock:
    """
    Nodes of one level that are computed together.

    Attributes:
        tokens (`torch.Tensor` of shape `(n, l)`): Packed tokens of each node; `T` beyond its end.
        parents (`torch.Tensor` of shape `(n,)`, *optional*): Number of the parent of each node; `None` for roots.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Level:
    """
    The nodes of one depth.

    Attributes:
        blocks (`tuple` of [`NodeBlock`]): The nodes in blocks of about equal length.
        tokens (`torch.Tensor` of shape `(sum of lengths,)`): Packed tokens of all nodes, node after node.
        cu_seqlens (`torch.Tensor` of shape `(nodes + 1,)`, int32): Where the nodes begin and end in `tokens`.
        parents (`torch.Tensor` of shape `(nodes,)`, *optional*): Number of the parent of each node.
        is_last (`bool`): Whether nobody goes on behind the nodes of this level.
    """

    blocks: tuple[NodeBlock, ...]
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    parents: torch.Tensor | None
    is_last: bool


class NodeTree:
    """
    The nodes of a layout, level by level.

    Nodes are numbered in the order of the levels, and within a level in the order of its blocks; behind the states
    that the forward sees of others, if it does, and a state of zeros for those that begin a row.

    Attributes:
        levels (`list` of [`Level`]): Roots first.
        take (`torch.Tensor` of shape `(T,)`): Where each packed token is in the outputs of all blocks, block by block.
        take_varlen (`torch.Tensor` of shape `(T,)`): Where it is in the tokens of all levels, level by level.
        forks (`list[int]`, *optional*): Packed tokens behind which other forwards go on; `None` if none can.
    """

    def __init__(self, layout: Layout, prefix_states: PrefixStates | None = None):
        self.layout, self.tokens = layout, layout.packed_tokens
        self.prefix_states = prefix_states = prefix_states or PrefixStates([])
        self.device = layout.packed_index.device
        self.forks = None if prefix_states.notes is None else list(prefix_states.notes.forks)
        self.before, self.seen = _parent_tokens(layout, prefix_states)
        nodes, parents = _nodes(layout.query_lengths, self.before, self.forks or [])
        depth: list[int] = []
        for parent in parents:  # parents come before their children
            depth.append(0 if parent < 0 else depth[parent] + 1)
        number = {-1: self.seen, **{-2 - n: n for n in range(self.seen)}} if self.seen else {}
        self.levels: list[Level] = []
        in_blocks, in_levels = [], []
        for d in range(max(depth) + 1):
            level = [n for n in range(len(nodes)) if depth[n] == d]
            blocks, pieces = [], []
            has_states = d > 0 or self.seen > 0
            for group in bucket_by_length([len(nodes[n]) for n in level]):
                members = [level[i] for i in group]
                own = [torch.arange(nodes[n].start, nodes[n].stop) for n in members]
                tokens = pad_sequence(own, batch_first=True, padding_value=self.tokens)
                before = (
                    torch.tensor([number[parents[n]] for n in members], device=self.device) if has_states else None
                )
                blocks.append(NodeBlock(tokens.to(self.device), before))
                number |= {n: len(number) + i for i, n in enumerate(members)}
                pieces += own
                in_blocks.append(tokens.flatten())
            bounds = torch.tensor([0, *map(len, pieces)]).cumsum(0).to(self.device, torch.int32)
            all_parents = torch.cat([block.parents for block in blocks]) if has_states else None
            is_last = d == max(depth) and self.forks is None
            tokens = torch.cat(pieces)
            self.levels.append(Level(tuple(blocks), tokens.to(self.device), bounds, all_parents, is_last))
            in_levels.append(tokens)
        # Every token is in one place; beyond the ends of nodes stands `T`, which is sorted behind all tokens.
        self.take = torch.cat(in_blocks).argsort()[: self.tokens].to(self.device)
        self.take_varlen = torch.cat(in_levels).argsort().to(self.device)
        ending = {node[-1]: number[n] for n, node in enumerate(nodes)}
        self._handed_on = torch.tensor(
            [ending[fork] for fork in self.forks or []], dtype=torch.int64, device=self.device
        )
        self._led: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @property
    def is_flat(self) -> bool:
        """Whether no state is handed on: each row is by itself, in this forward and beyond it."""
        return len(self.levels) == 1 and not self.seen and self.forks is None

    @cached_property
    def node_of(self) -> torch.Tensor:
        """Number of the node of each token, `(1, T)`, int32; of a tree of roots only."""
        lengths = torch.tensor(self.layout.query_lengths, device=self.device)
        return torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)[None].to(torch.int32)

    def convolve(
        self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int, key: Any
    ) -> torch.Tensor:
        """
        A convolution over a token and the `width` tokens before it on its path, from `(1, C, T)` to `(1, C, T)`.

        `run` computes it of one row. The states that forwards hand on under `key` are the last inputs of it.
        """
        index, own, ends = self.led(width)
        x = with_zero(x[0].transpose(0, 1))
        if self.seen:
            x = torch.cat([self.prefix_states.states(key).flatten(0, 1).to(x.dtype), x])
        if self.forks is not None:
            self.prefix_states.note(key, x[ends])
        return run(x.index_select(0, index).transpose(0, 1).unsqueeze(0)).index_select(2, own)

    def led(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        The segments, each led by the `width` tokens before it on its path (`T` where there is none); where the own
        tokens of the segments are among them, `(T,)`; and the last `width` tokens up to each fork, `(forks, width)`.

        Where states of other forwards are seen, all of this counts from the end of those.
        """
        if width not in self._led:
            first, lengths = self.seen * width, self.layout.query_lengths
            starts, segments, own = list(accumulate(lengths, initial=0)), [], []

            def up_to(token: int) -> torch.Tensor:
                if token == -1:
                    return torch.full((width,), first + self.tokens)
                if token < 0:
                    return torch.arange(width) + (-2 - token) * width
                at = bisect(starts, token) - 1
                end = token - starts[at] + 1
                return segments[at][end : end + width]

            for n, (before, length) in enumerate(zip(self.before, lengths, strict=True)):
                own.append(torch.arange(length) + starts[n] + (n + 1) * width)
                segments.append(torch.cat([up_to(before), torch.arange(length) + first + starts[n]]))
            ends = torch.stack([up_to(fork) for fork in self.forks]) if self.forks else torch.zeros(0, width).long()
            index, places = torch.cat(segments), torch.cat(own)
            self._led[width] = index.to(self.device), places.to(self.device), ends.to(self.device)
        return self._led[width]

    def over_blocks(
        self, step: Callable[..., tuple[Any, Any]], inputs: list[torch.Tensor], key: Any = None
    ) -> torch.Tensor:
        """
        Run a recurrence over the nodes, block by block, from inputs `(1, T, ...)` to an output `(1, T, ...)`.

        `step(parts, initial_states, with_states)` computes a block: its inputs `(n, l, ...)`, zero beyond the ends of
        nodes, the states `(n, ...)` before them (`None` at roots), and whether their final states are needed. It
        returns outputs `(n, l, ...)` and final states. Under `key` forwards hand states on.
        """
        padded = [with_zero(x[0]) for x in inputs]
        outputs, states = [], self._states(key)
        for level in self.levels:
            known: Any = torch.cat(states) if states else None
            for block in level.blocks:
                shape = block.tokens.shape
                parts = [x.index_select(0, block.tokens.flatten()).unflatten(0, shape) for x in padded]
                initial = None if block.parents is None else known.index_select(0, block.parents)
                output, final = step(parts, initial, not level.is_last)
                outputs.append(output.flatten(0, 1))
                if not level.is_last:
                    states.append(final)
        self._hand_on(key, states)
        return torch.cat(outputs).index_select(0, self.take).unsqueeze(0)

    def over_levels(
        self, step: Callable[..., tuple[Any, Any]], inputs: list[torch.Tensor], key: Any = None
    ) -> torch.Tensor:
        """
        As [`NodeTree.over_blocks`] with a variable-length kernel, one call for each level.

        `step(parts, initial_states, with_states, cu_seqlens)` is given the tokens of all nodes of a level in one row,
        `(1, t, ...)`. It returns outputs `(1, t, ...)` and final states, one for each node.
        """
        outputs, states = [], self._states(key)
        for level in self.levels:
            parts = [x.index_select(1, level.tokens) for x in inputs]
            initial = None if level.parents is None else torch.cat(states).index_select(0, level.parents)
            output, final = step(parts, initial, not level.is_last, level.cu_seqlens)
            outputs.append(output)
            if not level.is_last:
                states.append(final)
        self._hand_on(key, states)
        return torch.cat(outputs, dim=1).index_select(1, self.take_varlen)

    def _states(self, key: Any) -> list[torch.Tensor]:
        """The states that other forwards have handed on, and one of zeros, where there are any."""
        if not self.seen:
            return []
        seen = self.prefix_states.states(key)
        return [seen, torch.zeros_like(seen[:1])]

    def _hand_on(self, key: Any, states: list[torch.Tensor]) -> None:
        if self.forks is not None:
            self.prefix_states.note(key, torch.cat(states).index_select(0, self._handed_on))


def tree_of(call: PackedCall) -> NodeTree:
    """The tree of a packed forward."""
    return call.once("tree", lambda: NodeTree(call.layout, call.prefix_states))


def with_zero(x: torch.Tensor) -> torch.Tensor:
    """`(T, ...)` with one more token, which is zero: what the index `T` stands for."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _parent_tokens(layout: Layout, prefix_states: PrefixStates) -> tuple[list[int], int]:
    """
    The token before each segment on its path, and how many states of other forwards are seen.

    -1 stands for none, and `-2 - n` for a token of another forward, behind which state `n` is.
    """
    if layout.key_index is None:
        return [-1] * len(layout.query_lengths), 0
    queries, keys = torch.tensor(layout.query_lengths), torch.tensor(layout.key_lengths)
    places = (keys.cumsum(0) - queries - 1).clamp(min=0).to(layout.key_index.device)
    before = layout.key_index[places].cpu().where(keys > queries, -1).tolist()
    outer: list[int] = []
    begin = 0
    for states in prefix_states.outer:
        outer += [begin + fork for fork in states.forks]
        begin += len(states.ids)
    number = {token: -2 - n for n, token in enumerate(outer)} | {-1: -1}
    return [token - begin if token >= begin else number[token] for token in before], len(outer)


def _nodes(lengths: Iterable[int], parent_tokens: list[int], ends: list[int]) -> tuple[list[range], list[int]]:
    """
    The nodes of segments, each a range of tokens, and the number of the parent of each; below 0 for roots.

    Nodes end with segments, with the parent of a segment, and at the tokens of `ends`.
    """
    forks = {*parent_tokens, *ends}
    nodes: list[range] = []
    parents: list[int] = []
    ending: dict[int, int] = {}  # number of the node that ends with a token
    begin = 0
    for length, parent_token in zip(lengths, parent_tokens, strict=True):
        before, last = ending[parent_token] if parent_token >= 0 else parent_token, begin + length - 1
        for end in sorted({f for f in forks if begin <= f < last} | {last}):
            nodes.append(range(begin, end + 1))
            parents.append(before)
            before = ending[end] = len(nodes) - 1
            begin = end + 1
    return nodes, parents
