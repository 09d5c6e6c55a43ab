"""
A layout as a tree of nodes, for recurrences and convolutions whose state forks where rows diverge.

The packed tokens are cut into nodes: runs of tokens between two forks. A node begins with the final state of its
parent. Nodes of one depth form a level. A recurrence computes level after level, all nodes of a level at once. A short
convolution needs no states, only the few tokens before each segment on its path.

Example: the rows `1 2 3 4`, `1 2 5` and `1 6` share prefixes and pack into `1 2 3 4 | 5 | 6` (tokens 0 to 5). Node
`[0]` is the root. Nodes `[1]` and `[5]` form level 1; their parent is `[0]`. Nodes `[4]` and `[2, 3]` form level 2;
their parent is `[1]`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from ..call.calls import PackedCall
from ..call.prefix_states import PrefixStates
from ..layout.layout import Layout, cu_seqlens_of
from .row_buckets import bucket_by_length


__all__ = ["NodeTree", "tree_of"]


class Parent(NamedTuple):
    """
    Where the path of a segment or of a node comes from.

    `kind` is `"none"` at the beginning of a row, `"prefix"` for the prefix state `number`, and `"packed"` for this
    forward. For `"packed"`, `number` is a packed token (parent of a segment) or a node (parent of a node).
    """

    kind: Literal["none", "prefix", "packed"]
    number: int = 0


_NO_PARENT = Parent("none")


class NodeBlock(NamedTuple):
    """
    Nodes of one depth that a kernel computes in one call.

    Attributes:
        tokens (`torch.Tensor` of shape `(n, l)`):
            Packed tokens of each of `n` nodes, `T` beyond its end. For variable-length kernels `(1, t)`, the tokens of
            all nodes, node after node.
        parents (`torch.Tensor` of shape `(n,)`, *optional*):
            State number of the parent of each node; `None` if no node of this depth has an initial state.
        cu_seqlens (`torch.Tensor` of shape `(n + 1,)`, int32, *optional*):
            Where the nodes begin and end, for variable-length kernels.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None
    cu_seqlens: torch.Tensor | None = None


class NodeTree:
    """
    The nodes of a layout, level by level.

    States are numbered: first the prefix states, then one state of zeros for nodes that begin a row (both only in a
    forward with prefix states), then the final states of the nodes, level by level and within a level block by block.

    Attributes:
        parent_tokens (`list` of [`Parent`]): The token before each segment on its path.
        num_prefix_states (`int`): How many states of other forwards this forward reads.
        fork_tokens (`list[int]`, *optional*):
            Packed tokens after which other forwards continue; `None` if no other forward can.
    """

    def __init__(self, layout: Layout, prefix_states: PrefixStates | None = None):
        self.layout, self.tokens = layout, (T := layout.packed_tokens)
        self.prefix_states = prefix_states = prefix_states or PrefixStates([])
        self.device = layout.packed_index.device
        self.fork_tokens = None if prefix_states.records is None else list(prefix_states.records.fork_tokens)
        self.parent_tokens, self.num_prefix_states = _parent_tokens(layout, prefix_states)
        nodes, parents = _nodes(layout.queries.lengths, self.parent_tokens, self.fork_tokens or [])
        levels = _levels(nodes, parents)
        # Without prefix states roots have no initial state at all, and numbers begin with nodes.
        number: dict[Parent, int] = {}
        if self.num_prefix_states:
            number = {Parent("prefix", n): n for n in range(self.num_prefix_states)}
            number[_NO_PARENT] = self.num_prefix_states
        for n in chain(*chain(*levels)):
            number[Parent("packed", n)] = len(number)

        def block(members: list[int], is_varlen: bool) -> NodeBlock:
            tokens = [torch.arange(nodes[n].start, nodes[n].stop) for n in members]
            numbers = [number[parents[n]] for n in members if parents[n] in number]
            parent_states = torch.tensor(numbers) if numbers else None
            if is_varlen:
                return NodeBlock(torch.cat(tokens).unsqueeze(0), parent_states, cu_seqlens_of(map(len, tokens)))
            return NodeBlock(pad_sequence(tokens, batch_first=True, padding_value=T), parent_states)

        @cache
        def order_of(is_varlen: bool) -> tuple[list[list[NodeBlock]], torch.Tensor]:
            """
            The order in which a kernel computes the nodes: by depth, roots first, in blocks of about equal length (for
            variable-length kernels in one block for each depth). Then the index `(T,)` of each packed token in the
            outputs of all blocks, flattened and concatenated.
            """
            members = [[[*chain(*level)]] if is_varlen else level for level in levels]
            blocks = [[block(nodes_of_block, is_varlen) for nodes_of_block in level] for level in members]
            # The inverse permutation; the fillers, numbered `T`, come last.
            packed_index = torch.cat([x.tokens.flatten() for x in chain(*blocks)]).argsort()[:T]
            return tree_map_only(torch.Tensor, lambda x: x.to(self.device), (blocks, packed_index))

        self.order_of = order_of
        state_after = {node[-1]: number[Parent("packed", n)] for n, node in enumerate(nodes)}
        fork_states = [state_after[fork] for fork in self.fork_tokens or []]
        # A dtype, because a tensor of an empty list would be float32.
        self._fork_states = torch.tensor(fork_states, dtype=torch.int64, device=self.device)
        self.with_left_context = cache(self._with_left_context)

    @property
    def is_flat(self) -> bool:
        """Whether no row shares tokens, in this forward and beyond it: each segment is a whole row."""
        return self.layout.key_index is None and not self.num_prefix_states and self.fork_tokens is None

    @cached_property
    def seq_idx(self) -> torch.Tensor:
        """Number of the row of each token, `(1, T)`, int32; for flat trees only."""
        lengths = torch.tensor(self.layout.queries.lengths, device=self.device)
        return torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)[None].to(torch.int32)

    def convolve(
        self, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int, key: Hashable
    ) -> torch.Tensor:
        """
        A convolution over each token and the `width` tokens before it on its path, `(1, C, T)` to `(1, C, T)`.

        `run` convolves one row. `key` names the call: under it, the last `width` inputs before each fork are recorded
        for other forwards, and inputs of other forwards are read.
        """
        index, segment_index, fork_index = self.with_left_context(width)
        x = with_zero(x[0].transpose(0, 1))
        if self.num_prefix_states:
            x = torch.cat([self.prefix_states.initial_states(key).flatten(0, 1).to(x.dtype), x])
        if self.fork_tokens is not None:
            self.prefix_states.record(key, x[fork_index])
        return run(x.index_select(0, index).transpose(0, 1).unsqueeze(0)).index_select(2, segment_index)

    def _with_left_context(self, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Each segment after the `width` tokens before it on its path, as one row of `T + segments * width` tokens.

        Example, for `width=2` and the rows `1 2 3 4` and `1 2 5`, packed into `1 2 3 4 | 5` (`T` is 5): the row is
        `T T 0 1 2 3 | 0 1 4`, the segments' own tokens are at `2 3 4 5 8`.

        Returns:
            `tuple` of three `torch.Tensor`: index of each token of that row, where `T` stands for a zero; index of the
            packed tokens in that row, `(T,)`; index of the last `width` tokens up to each fork, `(forks, width)`. With
            prefix states the first and the last count from `num_prefix_states * width`: that many inputs of other
            forwards come before the packed tokens.
        """
        first, lengths = self.num_prefix_states * width, self.layout.queries.lengths
        starts, segments, segment_places = list(accumulate(lengths, initial=0)), [], []

        def context_up_to(parent: Parent) -> torch.Tensor:
            if parent.kind == "none":
                return torch.full((width,), first + self.tokens)
            if parent.kind == "prefix":
                return torch.arange(width) + parent.number * width
            segment = bisect(starts, parent.number) - 1
            # The segment has its own context in front, so the `width` tokens up to its token number `i` end at
            # `width + i` and begin at `i + 1`.
            begin = parent.number - starts[segment] + 1
            return segments[segment][begin : begin + width]

        for n, (parent, length) in enumerate(zip(self.parent_tokens, lengths, strict=True)):
            segment_places.append(torch.arange(length) + starts[n] + (n + 1) * width)
            segments.append(torch.cat([context_up_to(parent), torch.arange(length) + first + starts[n]]))
        forks = [context_up_to(Parent("packed", fork)) for fork in self.fork_tokens or []]
        last_tokens = torch.stack(forks) if forks else torch.zeros(0, width).long()
        index, segment_index = torch.cat(segments), torch.cat(segment_places)
        return index.to(self.device), segment_index.to(self.device), last_tokens.to(self.device)

    def scan(
        self,
        kernel: Callable[..., tuple[Any, Any]],
        inputs: list[torch.Tensor],
        key: Hashable = None,
        *,
        is_varlen: bool = False,
    ) -> torch.Tensor:
        """
        Run a recurrence over the nodes, level by level, from inputs `(1, T, ...)` to an output `(1, T, ...)`.

        `kernel(chunks, initial_states, with_states, cu_seqlens)` computes the nodes of a block: `chunks` are the
        inputs of its tokens, `(n, l, ...)` with zeros beyond the ends of nodes. Zeros must leave the state unchanged:
        pass the logarithm of a decay, not the decay, which would erase the state. With `is_varlen` they are
        `(1, t, ...)`, and `cu_seqlens` says where nodes begin and end. The kernel returns outputs for these tokens
        and, `with_states`, a final state for each node. `key` names the call: under it, states are recorded for other
        forwards, and the states of other forwards are read.
        """
        levels, packed_index = self.order_of(is_varlen)
        sources = [x[0] if is_varlen else with_zero(x[0]) for x in inputs]
        outputs, states = [], []
        if self.num_prefix_states:  # the prefix states and the state of zeros, in the order of their numbers
            prefix_states = self.prefix_states.initial_states(key)
            states = [prefix_states, torch.zeros_like(prefix_states[:1])]
        for depth, level in enumerate(levels, start=1):
            is_last = depth == len(levels) and self.fork_tokens is None  # no node continues from this level
            computed_states: Any = torch.cat(states) if states else None
            for block in level:
                chunks = [x.index_select(0, block.tokens.flatten()).unflatten(0, block.tokens.shape) for x in sources]
                initial = None if block.parents is None else computed_states.index_select(0, block.parents)
                output, final = kernel(chunks, initial, not is_last, block.cu_seqlens)
                outputs.append(output.flatten(0, 1))
                if not is_last:
                    states.append(final)
        if self.fork_tokens is not None:
            self.prefix_states.record(key, torch.cat(states).index_select(0, self._fork_states))
        return torch.cat(outputs).index_select(0, packed_index).unsqueeze(0)


def tree_of(call: PackedCall) -> NodeTree:
    """The tree of a packed forward, built once for all its mixers."""
    return call.cached("tree", lambda: NodeTree(call.layout, call.prefix_states))


def with_zero(x: torch.Tensor) -> torch.Tensor:
    """`(T, ...)` with one more token of zeros, at index `T`: the filler of indices."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _parent_tokens(layout: Layout, prefix_states: PrefixStates) -> tuple[list[Parent], int]:
    """The token before each segment on its path, and the number of states of other forwards."""
    if layout.key_index is None:  # keys are queries: each segment is a whole row
        return [_NO_PARENT] * len(layout.queries.lengths), 0
    queries, keys = torch.tensor(layout.queries.lengths), torch.tensor(layout.keys.lengths)
    # The keys of a segment end with its queries; the key before the first query is the parent. Segments without one
    # read a wrong place (clamped to be valid), and `where` replaces it.
    places = (keys.cumsum(0) - queries - 1).clamp(min=0).to(layout.key_index.device)
    tokens = layout.key_index[places].cpu().where(keys > queries, -1).tolist()
    # Keys of a forward with prefix states are numbered after the prefix tokens: shift them to packed tokens.
    prefix_forks: list[int] = []
    begin = 0
    for states in prefix_states.reads:
        prefix_forks += [begin + fork for fork in states.fork_tokens]
        begin += states.tokens
    parent_of = {token: Parent("prefix", n) for n, token in enumerate(prefix_forks)} | {-1: _NO_PARENT}
    parents = [Parent("packed", token - begin) if token >= begin else parent_of[token] for token in tokens]
    return parents, len(prefix_forks)


def _nodes(
    lengths: Iterable[int], parent_tokens: list[Parent], fork_tokens: list[int]
) -> tuple[list[range], list[Parent]]:
    """
    The packed tokens of each node of some segments, and its parent.

    A node ends at the end of its segment, at the parent token of a segment, and at each of `fork_tokens`. Example:
    two segments have lengths 4 and 1, and the second continues after token 1. The nodes are `0 1`, `2 3` and `4`; node
    0 is the parent of the other two.
    """
    forks = {parent.number for parent in parent_tokens if parent.kind == "packed"}.union(fork_tokens)
    nodes: list[range] = []
    parents: list[Parent] = []
    node_ending_at: dict[int, Parent] = {}
    begin = 0
    for length, parent_token in zip(lengths, parent_tokens, strict=True):
        is_packed, last = parent_token.kind == "packed", begin + length - 1
        parent = node_ending_at[parent_token.number] if is_packed else parent_token
        for end in sorted({f for f in forks if begin <= f < last} | {last}):
            nodes.append(range(begin, end + 1))
            parents.append(parent)
            parent = node_ending_at[end] = Parent("packed", len(nodes) - 1)
            begin = end + 1
    return nodes, parents


def _levels(nodes: list[range], parents: list[Parent]) -> list[list[list[int]]]:
    """The numbers of the nodes by depth, and at each depth in blocks of about equal length."""
    depths: list[int] = []  # how many nodes of this forward come before each one on its path
    for parent in parents:  # parents come before their children
        depths.append(depths[parent.number] + 1 if parent.kind == "packed" else 0)
    levels = [[n for n in range(len(nodes)) if depths[n] == depth] for depth in range(max(depths) + 1)]
    return [
        [[level[i] for i in block] for block in bucket_by_length([len(nodes[n]) for n in level])] for level in levels
    ]
