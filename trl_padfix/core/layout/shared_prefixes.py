"""
Layouts of a step whose micro-batches share prefixes, so that each distinct token of the step is computed once.

A micro-batch is a padded batch of full rows. Tokens that several micro-batches need form *shared prefixes*: tokens
with the same first and the same last user are one shared prefix. Each shared prefix has a forward of its own, just
before its first user. The forward of a micro-batch computes its other tokens, and reads the states of the shared
prefixes.

Micro-batches come depth first, so the shared prefixes that are in memory together are about one path of the prefix
tree.

A token has several numbers. `i` is a micro-batch or the forward of a prefix on its rows:

| a number | counts | held by |
|---|---|---|
| in the tree | the distinct tokens of the step, depth first | `paths`, `tokens_of_batch`, `SharedPrefix.tokens` |
| of a prefix | the shared prefixes, enclosing ones first | `owner` (-1: of none), `PrefixedLayout.prefixes` |
| flat | the columns of the padded `(b, l)` of `i`, row after row | `real_index`, `packed_index` |
| real | the real tokens of `i`, row after row | `source` (its index) |
| packed | what the forward `i` reads, then its new tokens | `packed_number`, `source`, `key_index` (their values) |
| in a prefix | the tokens of one prefix, ascending in the tree | `fork_tokens` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .build import prefix_sharing_layout
from .layout import Layout


if TYPE_CHECKING:
    from ..call.prefix_states import PrefixStates


__all__ = ["PrefixPlan", "PrefixedLayout", "plan_shared_prefixes"]

MIN_SAVED_TOKENS = 128
"""A prefix forward costs about as much as 128 tokens. A prefix that saves fewer is computed in each micro-batch."""

KV_MEMORY_FRACTION = 1 / 8
"""Approximate memory of a token's keys, values and their gradients, as a fraction of its activations' memory."""

NO_TOKENS = np.zeros(0, dtype=np.int64)
"""The tokens of a dummy forward, which only matches the collectives of other processes."""


@dataclass(frozen=True, eq=False)
class PrefixedLayout(Layout):
    """
    Layout of a forward whose rows begin with tokens that other forwards have computed.

    As a [`Layout`] it describes the padded batch. Its packed tokens are the tokens of the shared prefixes that the
    forward reads, prefix after prefix, followed by the new tokens, which the forward computes.

    Attributes:
        new ([`Layout`], *optional*): The tokens that the forward computes, with keys among all packed tokens. `None`
            if the forward computes none.
        prefixes (`tuple[int, ...]`): Numbers of the shared prefixes that the forward reads.
        is_prefix (`bool`): Whether this is the forward of a shared prefix, whose output nothing reads.
        fork_tokens (`tuple[int, ...]`): For a shared prefix: indices, among its new tokens, of the tokens from which
            paths of other forwards continue.
        prefix_states ([`PrefixStates`], *optional*): States of the `prefixes`, while the forward runs.
    """

    new: Layout | None = None
    prefixes: tuple[int, ...] = ()
    is_prefix: bool = False
    fork_tokens: tuple[int, ...] = ()
    prefix_states: PrefixStates | None = None

    # Also without padding: the forward must record or read prefix states.
    is_trivial = False  # type: ignore[assignment]

    @property
    def computed_tokens(self) -> int:
        """Tokens that the forward computes."""
        return 0 if self.new is None else self.new.computed_tokens

    def filled(self, multiple: int | Sequence[int]) -> PrefixedLayout:
        """The same layout with filler after its new tokens; see [`Layout.filled`]."""
        new = (self._one_filler_token() if self.new is None else self.new).filled(multiple)
        tokens = self.packed_index[: self.packed_tokens - (self.filler or 0)]
        packed_index = torch.cat([tokens, new.packed_index[new.computed_tokens :]])
        return replace(self, new=new, packed_index=packed_index, filler=new.filler)

    def _one_filler_token(self) -> Layout:
        """New tokens of a forward that has none of its own: a copy of the first token, which sees itself."""
        return Layout.of_segments(
            [1],
            [1],
            batch_shape=self.batch_shape,
            real_index=self.real_index,
            source=None,
            packed_index=self.packed_index[:1],
            positions=self.positions[:1],
            key_index=torch.full_like(self.packed_index[:1], self.packed_tokens),
            spans=(1,),
            key_source_positions=torch.cat([self.positions, self.positions[:1]]),
            filler=1,
        )


@dataclass(eq=False)
class SharedPrefix:
    """
    Tokens that several micro-batches need.

    Attributes:
        first_user, last_user (`int`): The first and the last micro-batch that need the tokens.
        tokens (`np.ndarray`): These tokens in the tree, ascending.
        recompute (`bool`): Whether only keys and values are kept until the last user. For the last user the tokens are
            computed a second time, with their graph.
        layouts (`dict[int, PrefixedLayout]`): Layouts of the prefix forward, by the micro-batch whose rows it runs on:
            the first user and, if the prefix is recomputed, the last one.
    """

    first_user: int
    last_user: int
    tokens: np.ndarray
    recompute: bool = False
    layouts: dict[int, PrefixedLayout] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PrefixPlan:
    """
    Layouts of the micro-batches of a step and of their shared prefixes.

    Attributes:
        layouts (`dict[int, PrefixedLayout]`): The layout of each micro-batch.
        prefixes (`dict[int, SharedPrefix]`): Shared prefixes by number; each reads only those with smaller numbers.
    """

    layouts: dict[int, PrefixedLayout]
    prefixes: dict[int, SharedPrefix]


def plan_shared_prefixes(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], budget: int, gather: Callable[[list], list] | None = None
) -> PrefixPlan | None:
    """
    Plan the forwards of a step: find the shared prefixes of its micro-batches and build all layouts.

    Args:
        batches (`Sequence[tuple[torch.Tensor, torch.Tensor]]`):
            Ids and mask of each micro-batch, both `(b, l)`, on the host.
        budget (`int`):
            Maximum number of tokens whose activations are kept at a time. If a micro-batch and the prefixes in memory
            exceed it, prefixes that later micro-batches need too keep only keys and values, and are recomputed for the
            last one.
        gather (`Callable[[list], list]`, *optional*):
            Concatenates lists of all processes, which must have equally many micro-batches. If given, all processes
            run the same forwards: a process that lacks a shared prefix runs a dummy forward of one token for it.

    Returns:
        [`PrefixPlan`], or `None` if the micro-batches have too little in common.
    """
    tree = _StepPrefixTree(batches)
    prefixes = tree.find_shared_prefixes()
    tree.choose_recomputed(prefixes, budget)
    if gather is not None:
        prefixes = _union_over_processes(prefixes, gather)
    if not prefixes:
        return None
    for n, prefix in enumerate(prefixes):
        # A prefix may read a recomputed one before it that ends with the same micro-batch. Only if both are computed
        # again do gradients flow through both.
        prefix.recompute |= any(other.recompute and other.last_user == prefix.last_user for other in prefixes[:n])
    owner = _prefix_of_token(tree.tokens, prefixes)
    for n, prefix in enumerate(prefixes):
        users = (prefix.first_user, prefix.last_user) if prefix.recompute else (prefix.first_user,)
        prefix.layouts.update({i: tree.layout(i, owner, prefixes, prefix=n) for i in users})
    micro_batches = {i: tree.layout(i, owner, prefixes) for i in range(len(batches))}
    if gather is not None:  # every micro-batch calls the layers, to join the collectives of other processes
        micro_batches = {i: x.filled(1) if x.new is None else x for i, x in micro_batches.items()}
    return PrefixPlan(micro_batches, dict(enumerate(prefixes)))


def _prefix_of_token(tokens: int, prefixes: list[SharedPrefix]) -> np.ndarray:
    """Number of the shared prefix that each of the tree's `tokens` belongs to; -1 for none."""
    owner = np.full(tokens, -1)
    for n, prefix in enumerate(prefixes):
        owner[prefix.tokens] = n
    return owner


def _union_over_processes(prefixes: list[SharedPrefix], gather: Callable[[list], list]) -> list[SharedPrefix]:
    """
    Union of the shared prefixes of all processes. A prefix is recomputed if any process recomputes it.

    A prefix that this process lacks has no tokens here: a dummy forward keeps the collectives matched.
    """
    union: dict[tuple[int, int], bool] = {}
    for users, recompute in gather([((x.first_user, x.last_user), x.recompute) for x in prefixes]):
        union[users] = union.get(users, False) or recompute
    tokens = {(prefix.first_user, prefix.last_user): prefix.tokens for prefix in prefixes}
    # The order of `find_shared_prefixes`.
    all_users = sorted(union, key=lambda users: (users[0], -users[1]))
    return [SharedPrefix(*users, tokens.get(users, NO_TOKENS), union[users]) for users in all_users]


class _StepPrefixTree:
    """
    The prefix tree of all rows of a step, whose tokens are numbered depth first.

    Attributes:
        tokens (`int`): Number of tokens in the tree.
        positions (`np.ndarray` of shape `(tokens,)`): Position of each token in its rows.
        paths (`list[list[np.ndarray]]`): For each micro-batch and each of its rows, the row's tokens in the tree.
        masks (`list[np.ndarray]`): Mask of each micro-batch, `(b, l)`, bool.
        tokens_of_batch (`list[np.ndarray]`): The tokens that each micro-batch needs, ascending.

    Example: the micro-batches 1-2-3 and 1-2-4 share the prefix 1-2, and 1-5 shares 1 with them. The tree's tokens are
    1, 2, 3, 4, 5. Token 0 has the first user 0 and the last user 2, token 1 has 0 and 1: two prefixes.

    ```python
    >>> import torch

    >>> rows = [torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4]]), torch.tensor([[1, 5]])]
    >>> tree = _StepPrefixTree([(row, torch.ones_like(row)) for row in rows])
    >>> [paths[0].tolist() for paths in tree.paths]
    [[0, 1, 2], [0, 1, 3], [0, 4]]
    >>> prefixes = [SharedPrefix(0, 2, np.array([0])), SharedPrefix(0, 1, np.array([1]))]
    >>> owner = _prefix_of_token(tree.tokens, prefixes)
    >>> owner.tolist()
    [0, 1, -1, -1, -1]
    >>> layout = tree.layout(1, owner, prefixes)  # of 1-2-4
    >>> layout.prefixes, layout.packed_index.tolist(), layout.source.tolist()
    ((0, 1), [0, 1, 2], [0, 1, 2])
    >>> layout.new.queries.lengths, layout.new.key_index.tolist(), layout.new.packed_index.tolist()
    ((1,), [0, 1, 2], [2])
    >>> tree.fork_tokens(owner, 0, prefixes[0].tokens)  # 1-2 and 1-5 diverge after the only token of prefix 0
    (0,)

    ```
    """

    def __init__(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        # One padded batch of all rows. Prefixes are compared by position in the row, so any side of padding will do.
        width = max(ids.shape[1] for ids, _ in batches)
        ids, mask = (
            torch.cat([torch.nn.functional.pad(x.to(torch.int64), (0, width - x.shape[1])) for x in tensors])
            for tensors in zip(*batches, strict=True)
        )
        layout = prefix_sharing_layout(ids, mask)
        source = layout.source if layout.source is not None else torch.arange(layout.real_tokens)
        # `prefix_sharing_layout` sorts the rows, which numbers the packed tokens depth first.
        self.tokens, self.positions = layout.packed_tokens, layout.positions.numpy()
        paths = np.split(source.numpy(), np.cumsum(mask.sum(1).numpy())[:-1])
        ends = np.cumsum([0, *(len(ids) for ids, _ in batches)])
        self.paths = [paths[begin:end] for begin, end in pairwise(ends)]
        self.masks = [mask.numpy() != 0 for _, mask in batches]
        self.tokens_of_batch = [np.unique(np.concatenate(paths)) for paths in self.paths]

    def find_shared_prefixes(self) -> list[SharedPrefix]:
        """Shared prefixes that are worth a forward; each comes after all that it reads."""
        count = len(self.paths)
        first_user, last_user = np.full(self.tokens, count), np.full(self.tokens, -1)
        users = np.zeros(self.tokens, dtype=np.int64)
        for i, tokens in enumerate(self.tokens_of_batch):
            first_user[tokens] = np.minimum(first_user[tokens], i)
            last_user[tokens] = i
            users[tokens] += 1
        shared = np.flatnonzero(users > 1)
        # Sort key: first user ascending, last user descending. The users of a token include the users of all tokens
        # after it on a path, so an enclosing prefix comes before those that depend on it.
        keys = first_user[shared] * count + (count - 1 - last_user[shared])
        candidates = [shared[keys == key] for key in np.unique(keys)]
        prefixes: list[SharedPrefix] = []
        is_read = np.zeros(self.tokens, dtype=bool)  # whether a chosen prefix reads the token
        # From the last to the first: a prefix that saves little is chosen if a chosen prefix after it reads it.
        for tokens in reversed(candidates):
            saved = int((users[tokens] - 1).sum())
            if saved >= MIN_SAVED_TOKENS or is_read[tokens].any():
                prefix = SharedPrefix(int(first_user[tokens[0]]), int(last_user[tokens[0]]), tokens)
                prefixes.append(prefix)
                for path in self.paths[prefix.first_user]:
                    on_path = np.flatnonzero(np.isin(path, tokens))
                    if len(on_path):
                        is_read[path[: on_path[-1]]] = True
        return prefixes[::-1]

    def choose_recomputed(self, prefixes: list[SharedPrefix], budget: int) -> None:
        """Recompute prefixes whose activations do not fit into the budget while a user before the last one runs."""
        owner = _prefix_of_token(self.tokens, prefixes)
        for i, tokens in enumerate(self.tokens_of_batch):
            # Memory while micro-batch `i` runs, in tokens with activations: its new tokens and the prefixes alive.
            load = int((owner[tokens] < 0).sum())
            alive = [prefix for prefix in prefixes if prefix.first_user <= i <= prefix.last_user]
            for prefix in alive:
                keeps_only_kv = prefix.recompute and prefix.last_user > i
                load += len(prefix.tokens) * (KV_MEMORY_FRACTION if keeps_only_kv else 1)
            # Greedy: the largest prefixes first, until the activations fit the budget.
            for prefix in sorted(alive, key=lambda prefix: -len(prefix.tokens)):
                if load > budget and prefix.last_user > i and not prefix.recompute:
                    prefix.recompute = True
                    load -= len(prefix.tokens) * (1 - KV_MEMORY_FRACTION)

    def fork_tokens(self, owner: np.ndarray, prefix: int, tokens: np.ndarray) -> tuple[int, ...]:
        """Indices, among a prefix's `tokens`, of the tokens whose next token on a path is outside of the prefix."""
        forks = []
        for path in chain(*self.paths):
            in_prefix = owner[path] == prefix
            leaves_prefix = in_prefix[:-1] & ~in_prefix[1:]
            forks.append(path[:-1][leaves_prefix])
        return tuple(np.searchsorted(tokens, np.unique(np.concatenate(forks))).tolist())

    def layout(self, batch: int, owner: np.ndarray, shared: list[SharedPrefix], prefix: int = -1) -> PrefixedLayout:
        """
        Layout of a micro-batch or, if `prefix` is given, of that prefix's forward on the rows of the micro-batch.

        `owner` holds the shared prefix of each token. The class has an example.
        """
        is_dummy = prefix >= 0 and not len(shared[prefix].tokens)
        paths, flat_index = self._paths_of(batch, owner, prefix, is_dummy)
        path_tokens = np.concatenate(paths)
        # A dummy forward reads nothing: its prefixes may not have been computed.
        prefixes = [] if is_dummy else [n for n in np.unique(owner[path_tokens]).tolist() if n not in (-1, prefix)]
        read_tokens = np.concatenate([NO_TOKENS, *(shared[n].tokens for n in prefixes)])
        # The packed tokens, as tokens of the tree: first those that the forward reads, then the new ones, depth first.
        tokens = np.concatenate([read_tokens, np.setdiff1d(path_tokens, read_tokens)])
        T = len(tokens)
        packed_number = np.full(self.tokens, -1)  # the packed token of each token of the tree
        packed_number[tokens] = np.arange(T)
        # A prefix may hold tokens that this micro-batch does not need: their index stays 0, and nothing reads it.
        packed_index = np.zeros(T, dtype=np.int64)
        packed_index[packed_number[path_tokens]] = np.concatenate(flat_index)
        # -1 marks tokens of the batch outside of this prefix forward. Nothing reads their output; 0 is a valid index.
        source = torch.from_numpy(packed_number[np.concatenate(self.paths[batch])]).clamp(min=0)
        index_maps: dict[str, Any] = {
            "batch_shape": self.masks[batch].shape,
            "real_index": torch.from_numpy(np.flatnonzero(self.masks[batch])),
            "packed_index": torch.from_numpy(packed_index),
            "positions": torch.from_numpy(self.positions[tokens]),
        }
        return PrefixedLayout.of_segments(
            [T],
            [T],
            **index_maps,
            source=source,
            key_index=None,
            spans=(T,),
            new=self._new_tokens(paths, packed_number, len(read_tokens), index_maps),
            prefixes=tuple(prefixes),
            is_prefix=prefix >= 0,
            fork_tokens=self.fork_tokens(owner, prefix, shared[prefix].tokens) if prefix >= 0 else (),
        )

    def _paths_of(
        self, batch: int, owner: np.ndarray, prefix: int, is_dummy: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The paths of a forward's rows, as tokens of the tree, and their indices in the flattened micro-batch."""
        paths, real_index = self.paths[batch], np.flatnonzero(self.masks[batch])
        flat_index = np.split(real_index, np.cumsum([len(path) for path in paths])[:-1])
        if is_dummy:  # one token, which sees only itself
            return [paths[0][:1]], [flat_index[0][:1]]
        if prefix < 0:
            return paths, flat_index
        # Rows up to and including their last token in the prefix; rows without such a token are left out.
        cut_paths, cut_index = [], []
        for path, index in zip(paths, flat_index, strict=True):
            in_prefix = np.flatnonzero(owner[path] == prefix)
            if len(in_prefix):
                cut_paths.append(path[: in_prefix[-1] + 1])
                cut_index.append(index[: in_prefix[-1] + 1])
        return cut_paths, cut_index

    def _new_tokens(
        self, paths: list[np.ndarray], packed_number: np.ndarray, num_read: int, index_maps: dict[str, Any]
    ) -> Layout | None:
        """
        Layout of the new tokens, whose keys are all tokens of their paths; `None` if there are no new tokens.

        `packed_number` is the packed token of each token of the tree. The first `num_read` packed tokens are not new.
        """
        segment_paths, query_lengths, end = [], [], num_read
        # Tokens are numbered depth first, so paths sorted by their last tokens are in the order of the tree. A path
        # then begins with its tokens below `end`, the tokens of prefixes and of earlier paths. The others are new.
        for path in sorted(paths, key=lambda path: path[-1]):
            if queries := int((packed_number[path] >= end).sum()):
                segment_paths.append(path)
                query_lengths.append(queries)
                end += queries
        if not segment_paths:
            return None
        key_lengths = [len(path) for path in segment_paths]
        keys_are_queries = not num_read and query_lengths == key_lengths
        return Layout.of_segments(
            query_lengths,
            key_lengths,
            **index_maps
            | {"packed_index": index_maps["packed_index"][num_read:], "positions": index_maps["positions"][num_read:]},
            source=None,
            key_index=None if keys_are_queries else torch.from_numpy(packed_number[np.concatenate(segment_paths)]),
            spans=tuple((self.positions[[path[-1] for path in segment_paths]] + 1).tolist()),
            key_source_positions=None if keys_are_queries else index_maps["positions"],
        )
