"""
A layout as a tree, for recurrences and convolutions whose state forks where prefixes part.

The packed tokens are cut into nodes: runs of tokens between two forks. A node begins with the state in which its
parent ended. Nodes of one depth are a level; a recurrence computes level after level, all nodes of a level at once. A
short convolution needs no states, only the few tokens before each segment on its path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..call.calls import PackedCall
from ..layout.layout import Layout
from .row_blocks import grouped_by_length


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
        is_last (`bool`): Whether no node of this level has children.
    """

    blocks: tuple[NodeBlock, ...]
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    parents: torch.Tensor | None
    is_last: bool


class NodeTree:
    """
    The nodes of a layout, level by level.

    Nodes are numbered in the order of the levels, and within a level in the order of its blocks.

    Attributes:
        levels (`list` of [`Level`]): Roots first.
        take (`torch.Tensor` of shape `(T,)`): Where each packed token is in the outputs of all blocks, block by block.
        take_varlen (`torch.Tensor` of shape `(T,)`): Where it is in the tokens of all levels, level by level.
    """

    def __init__(self, layout: Layout):
        self.layout, self.tokens = layout, layout.packed_tokens
        self.device = layout.packed_index.device
        nodes, parents = _nodes(layout.query_lengths, _parent_tokens(layout))
        depth: list[int] = []
        for parent in parents:  # parents come before their children
            depth.append(0 if parent < 0 else depth[parent] + 1)
        number: dict[int, int] = {}
        self.levels: list[Level] = []
        in_blocks, in_levels = [], []
        for d in range(max(depth) + 1):
            level = [n for n in range(len(nodes)) if depth[n] == d]
            blocks, pieces = [], []
            for group in grouped_by_length([len(nodes[n]) for n in level]):
                members = [level[i] for i in group]
                own = [torch.arange(nodes[n].start, nodes[n].stop) for n in members]
                tokens = pad_sequence(own, batch_first=True, padding_value=self.tokens)
                before = torch.tensor([number[parents[n]] for n in members], device=self.device) if d else None
                blocks.append(NodeBlock(tokens.to(self.device), before))
                number |= {n: len(number) + i for i, n in enumerate(members)}
                pieces += own
                in_blocks.append(tokens.flatten())
            bounds = torch.tensor([0, *map(len, pieces)]).cumsum(0).to(self.device, torch.int32)
            all_parents = torch.cat([block.parents for block in blocks]) if d else None
            tokens = torch.cat(pieces)
            self.levels.append(Level(tuple(blocks), tokens.to(self.device), bounds, all_parents, d == max(depth)))
            in_levels.append(tokens)
        # Every token is in one place; beyond the ends of nodes stands `T`, which is sorted behind all tokens.
        self.take = torch.cat(in_blocks).argsort()[: self.tokens].to(self.device)
        self.take_varlen = torch.cat(in_levels).argsort().to(self.device)
        self._led: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def node_of(self) -> torch.Tensor:
        """Number of the node of each token, `(1, T)`, int32; of a tree of roots only."""
        lengths = torch.tensor(self.layout.query_lengths, device=self.device)
        return torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)[None].to(torch.int32)

    def led(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The packed tokens of the segments, each led by the `width` tokens before it on its path (`T` where there is
        none), and where the own tokens of the segments are among them, `(T,)`.
        """
        if width not in self._led:
            layout, T = self.layout, self.tokens
            keys = torch.arange(T, device=self.device) if layout.key_index is None else layout.key_index
            nothing = torch.full((width,), T, device=self.device)
            pieces, own, at, token = [], [], 0, 0
            for path, queries in zip(keys.split(layout.key_lengths), layout.query_lengths, strict=True):
                shared = len(path) - queries
                before = path[max(0, shared - width) : shared]
                pieces += [nothing[len(before) :], before, torch.arange(token, token + queries, device=self.device)]
                own.append(torch.arange(at + width, at + width + queries))
                at, token = at + width + queries, token + queries
            self._led[width] = torch.cat(pieces), torch.cat(own).to(self.device)
        return self._led[width]

    def over_blocks(self, step: Callable[..., tuple[Any, Any]], inputs: list[torch.Tensor]) -> torch.Tensor:
        """
        Run a recurrence over the nodes, block by block, from inputs `(1, T, ...)` to an output `(1, T, ...)`.

        `step(parts, initial_states, with_states)` computes a block: its inputs `(n, l, ...)`, zero beyond the ends of
        nodes, the states `(n, ...)` before them (`None` at roots), and whether their final states are needed. It
        returns outputs `(n, l, ...)` and final states.
        """
        padded = [with_zero(x[0]) for x in inputs]
        outputs, states = [], []
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
        return torch.cat(outputs).index_select(0, self.take).unsqueeze(0)

    def over_levels(self, step: Callable[..., tuple[Any, Any]], inputs: list[torch.Tensor]) -> torch.Tensor:
        """
        As [`NodeTree.over_blocks`] with a variable-length kernel, one call for each level.

        `step(parts, initial_states, with_states, cu_seqlens)` is given the tokens of all nodes of a level in one row,
        `(1, t, ...)`. It returns outputs `(1, t, ...)` and final states, one for each node.
        """
        outputs, states = [], []
        for level in self.levels:
            parts = [x.index_select(1, level.tokens) for x in inputs]
            initial = None if level.parents is None else torch.cat(states).index_select(0, level.parents)
            output, final = step(parts, initial, not level.is_last, level.cu_seqlens)
            outputs.append(output)
            if not level.is_last:
                states.append(final)
        return torch.cat(outputs, dim=1).index_select(1, self.take_varlen)


def tree_of(call: PackedCall) -> NodeTree:
    """The tree of a packed forward."""
    return call.once("tree", lambda: NodeTree(call.layout))


def with_zero(x: torch.Tensor) -> torch.Tensor:
    """`(T, ...)` with one more token, which is zero: what the index `T` stands for."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _parent_tokens(layout: Layout) -> list[int]:
    """The token before each segment on its path; -1 where there is none."""
    if layout.key_index is None:
        return [-1] * len(layout.query_lengths)
    queries, keys = torch.tensor(layout.query_lengths), torch.tensor(layout.key_lengths)
    before = (keys.cumsum(0) - queries - 1).clamp(min=0).to(layout.key_index.device)
    return layout.key_index[before].cpu().where(keys > queries, -1).tolist()


def _nodes(lengths: Iterable[int], parent_tokens: list[int]) -> tuple[list[range], list[int]]:
    """The nodes of segments, each a range of tokens, and the number of the parent of each; -1 for roots."""
    forks = set(parent_tokens)
    nodes: list[range] = []
    parents: list[int] = []
    ending = {-1: -1}  # number of the node that ends with a token
    begin = 0
    for length, parent_token in zip(lengths, parent_tokens, strict=True):
        before, last = ending[parent_token], begin + length - 1
        for end in sorted({f for f in forks if begin <= f < last} | {last}):
            nodes.append(range(begin, end + 1))
            parents.append(before)
            before = ending[end] = len(nodes) - 1
            begin = end + 1
    return nodes, parents
