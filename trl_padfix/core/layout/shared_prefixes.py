"""
Layouts of a step that is computed in pieces, each distinct token of it once.

A piece is a padded batch of whole rows. Tokens that several pieces need form *trunks*, one for those that the same
first and the same last piece need. A trunk has a forward of its own, before that of its first piece; the forward of a
piece computes what no trunk has, and looks at the trunks for the rest of its rows. Pieces come depth first, so trunks
that are needed at one time are about one path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from .build import prefix_sharing_layout
from .layout import Layout


__all__ = ["PrefixPlan", "PrefixedLayout", "SharedPrefix", "plan_shared_prefixes"]

FORWARD = 128
"""Tokens that are computed in the time that one more forward takes, about: a trunk that saves fewer is none."""

STATES = 1 / 8
"""What the keys and values of a token need of the memory that its activations need, with their gradients, about."""


@dataclass(frozen=True, eq=False)
class PrefixedLayout(Layout):
    """
    Layout of a forward whose rows begin with tokens that other forwards have computed.

    As a [`Layout`] it is that of the padded batch: its packed tokens are those of the `outer` trunks, trunk after
    trunk, and then those that the forward computes.

    Attributes:
        own ([`Layout`], *optional*): What the forward computes; its keys are numbered as above. `None` for nothing.
        outer (`tuple[int, ...]`): Numbers of the trunks that it looks at.
        is_trunk (`bool`): Whether it is a trunk: nobody reads what its forward returns.
        forks (`tuple[int, ...]`): Which of its own tokens, if it is a trunk, other forwards go on behind.
        sight ([`PrefixStates`], *optional*): Their states, in a forward that is running.
    """

    own: Layout | None = None
    outer: tuple[int, ...] = ()
    is_prefix: bool = False
    forks: tuple[int, ...] = ()
    prefix_states: Any = None

    is_trivial = False  # type: ignore[assignment]

    @property
    def computed_tokens(self) -> int:
        """Tokens that the forward computes."""
        return 0 if self.own is None else self.own.packed_tokens


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """
    Tokens that several pieces need.

    Attributes:
        first, last (`int`): The first and the last piece that need them.
        tokens (`int`): How many they are.
        again (`bool`): Whether they are computed a second time for the last piece, and only keys and values kept.
        layouts (`dict[int, PrefixedLayout]`): Those of its forward, in the batch of the first piece and, if it is
            computed again, of the last one.
    """

    first: int
    last: int
    tokens: int
    again: bool
    layouts: dict[int, PrefixedLayout]


@dataclass(frozen=True, eq=False)
class PrefixPlan:
    """
    How the pieces of a step are computed.

    Attributes:
        layouts (`dict[int, PrefixedLayout]`): One for each piece.
        trunks (`dict[int, SharedPrefix]`): By number; each looks at those before it only.
    """

    layouts: dict[int, PrefixedLayout]
    prefixes: dict[int, SharedPrefix]

    @property
    def summary(self) -> str:
        """What is computed once and what twice, in a sentence."""
        again = [prefix.tokens for prefix in self.prefixes.values() if prefix.again]
        text = (
            f"The {len(self.layouts)} micro-batches of this step have {len(self.prefixes)} prefixes in common, of "
            f"{sum(prefix.tokens for prefix in self.prefixes.values())} tokens, which are computed once for all of them"
        )
        if not again:
            return f"{text}."
        return f"{text}; {len(again)} of them ({sum(again)} tokens) a second time, for which less is kept meanwhile."


def plan_shared_prefixes(
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]], budget: int, gather: Callable[[list], list] | None = None
) -> PrefixPlan | None:
    """
    The layouts of pieces and of their trunks.

    Args:
        batches (`Sequence[tuple[torch.Tensor, torch.Tensor]]`):
            Ids and mask of each piece, `(b, l)` both, on the host.
        budget (`int`):
            Tokens whose activations are to be kept at one time. Where pieces and the trunks that they need are more,
            trunks that later pieces need too are computed again for the last of them.
        gather (`Callable[[list], list]`, *optional*):
            Joins lists of all processes that have as many pieces, where these have to run like forwards: what one
            computes as a trunk is a trunk on all of them, if need be of one token that nobody looks at.

    Returns:
        [`PrefixPlan`], or `None` where pieces have too little in common.
    """
    step = _StepPrefixTree(batches)
    groups = step.groups()
    again = step.computed_again(groups, budget)
    if gather is not None:
        groups, again = _of_all_processes(groups, again, gather)
    if not groups:
        return None
    owner = _owner(step.tokens, groups)
    prefixes: dict[int, SharedPrefix] = {}
    for n, (first, last, tokens) in enumerate(groups):
        forks = step.forks(owner, n, tokens)
        layouts = {
            i: replace(step.layout(i, owner, groups, prefix=n), forks=forks)
            for i in ((first, last) if again[n] else (first,))
        }
        prefixes[n] = SharedPrefix(first, last, len(tokens), again[n], layouts)
    pieces = {i: step.layout(i, owner, groups) for i in range(len(batches))}
    for i, layout in pieces.items():
        if gather is not None and layout.own is None:  # a forward in its place
            groups.append((i, i, NO_TOKENS))
            n = len(prefixes)
            prefixes[n] = SharedPrefix(i, i, 0, False, {i: step.layout(i, owner, groups, prefix=n)})
    return PrefixPlan(pieces, prefixes)


_PrefixSpan = tuple[int, int, np.ndarray]
"""First piece, last piece and tokens of a trunk."""

NO_TOKENS = np.zeros(0, dtype=np.int64)
"""The tokens of a forward that is run because other processes run one."""


def _owner(tokens: int, groups: list[_PrefixSpan]) -> np.ndarray:
    """The group of each token; -1 for none."""
    owner = np.full(tokens, -1)
    for n, (_, _, of_group) in enumerate(groups):
        owner[of_group] = n
    return owner


def _of_all_processes(
    groups: list[_PrefixSpan], again: list[bool], gather: Callable[[list], list]
) -> tuple[list[_PrefixSpan], list[bool]]:
    """The trunks that any process has, without tokens where it is another one, and which are computed again."""
    own = {(first, last): tokens for first, last, tokens in groups}
    found: dict[tuple[int, int], bool] = {}
    for key, is_again in gather([*zip(own, again, strict=True)]):
        found[key] = found.get(key, False) or is_again
    keys = sorted(found, key=lambda key: (key[0], -key[1]))
    return [(*key, own.get(key, NO_TOKENS)) for key in keys], _seen_with_graph(keys, [found[key] for key in keys])


def _seen_with_graph(spans: list[tuple[int, int]], again: list[bool]) -> list[bool]:
    """What looks at a trunk that is computed again for the same piece has to see it with its graph."""
    for n, (_, last) in enumerate(spans):
        again[n] = again[n] or any(again[m] and spans[m][1] == last for m in range(n))
    return again


class _StepPrefixTree:
    """The trie of all rows of a step: its tokens are numbered depth first."""

    def __init__(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]):
        width = max(ids.shape[1] for ids, _ in batches)
        ids, mask = (
            torch.cat([torch.nn.functional.pad(x.to(torch.int64), (0, width - x.shape[1])) for x in given])
            for given in zip(*batches, strict=True)
        )
        trie = prefix_sharing_layout(ids, mask)
        source = trie.source if trie.source is not None else torch.arange(trie.real_tokens)
        self.tokens, self.positions = trie.packed_tokens, trie.positions.numpy()
        paths = np.split(source.numpy(), np.cumsum(mask.sum(1).numpy())[:-1])
        ends = np.cumsum([0, *(len(ids) for ids, _ in batches)])
        self.paths = [paths[begin:end] for begin, end in pairwise(ends)]
        self.masks = [mask.numpy() != 0 for _, mask in batches]
        self.needed = [np.unique(np.concatenate(paths)) for paths in self.paths]

    def groups(self) -> list[_PrefixSpan]:
        """The trunks, each behind those that it looks at."""
        first, last = np.full(self.tokens, len(self.paths)), np.full(self.tokens, -1)
        users = np.zeros(self.tokens, dtype=np.int64)
        for i, tokens in enumerate(self.needed):
            first[tokens] = np.minimum(first[tokens], i)
            last[tokens] = i
            users[tokens] += 1
        shared = np.flatnonzero(users > 1)
        keys = first[shared] * len(self.paths) + (len(self.paths) - 1 - last[shared])
        found = [shared[keys == key] for key in np.unique(keys)]
        # One that saves little is computed by each of its pieces, unless another one looks at it.
        kept: list[_PrefixSpan] = []
        needed = np.zeros(self.tokens, dtype=bool)
        for tokens in reversed(found):
            if int((users[tokens] - 1).sum()) >= FORWARD or needed[tokens].any():
                kept.append((int(first[tokens[0]]), int(last[tokens[0]]), tokens))
                for path in self.paths[kept[-1][0]]:
                    on_path = np.flatnonzero(np.isin(path, tokens))
                    if len(on_path):
                        needed[path[: on_path[-1]]] = True
        return kept[::-1]

    def computed_again(self, groups: list[_PrefixSpan], budget: int) -> list[bool]:
        """Of each trunk, whether its activations would not fit beside the pieces before its last one."""
        owner = _owner(self.tokens, groups)
        again = [False] * len(groups)
        for i, tokens in enumerate(self.needed):
            load = int((owner[tokens] < 0).sum())
            alive = [n for n, (first, last, _) in enumerate(groups) if first <= i <= last]
            load += sum(len(groups[n][2]) * (STATES if again[n] and groups[n][1] > i else 1) for n in alive)
            for n in sorted(alive, key=lambda n: -len(groups[n][2])):
                if load > budget and groups[n][1] > i and not again[n]:
                    again[n] = True
                    load -= len(groups[n][2]) * (1 - STATES)
        return _seen_with_graph([(first, last) for first, last, _ in groups], again)

    def forks(self, owner: np.ndarray, prefix: int, tokens: np.ndarray) -> tuple[int, ...]:
        """At which of the `tokens` of a trunk paths leave it."""
        ends = [path[:-1][(owner[path[:-1]] == prefix) & (owner[path[1:]] != prefix)] for path in chain(*self.paths)]
        return tuple(np.searchsorted(tokens, np.unique(np.concatenate(ends))).tolist())

    def layout(self, i: int, owner: np.ndarray, groups: list[_PrefixSpan], prefix: int = -1) -> PrefixedLayout:
        """The layout of a piece, or of a `prefix` in its batch."""
        paths, real = self.paths[i], np.flatnonzero(self.masks[i])
        source = np.concatenate(paths)
        columns = np.split(real, np.cumsum([len(path) for path in paths])[:-1])
        is_empty = prefix >= 0 and not len(groups[prefix][2])
        if is_empty:  # a token that looks at nothing
            paths, columns = [paths[0][:1]], [columns[0][:1]]
        elif prefix >= 0:  # the rows up to their last token in the trunk
            ends = [np.flatnonzero(owner[path] == prefix)[-1:] + 1 for path in paths]
            paths = [path[: end[0]] for path, end in zip(paths, ends, strict=True) if len(end)]
            columns = [places[: end[0]] for places, end in zip(columns, ends, strict=True) if len(end)]
        needed = np.concatenate(paths)
        outer = [] if is_empty else [n for n in np.unique(owner[needed]).tolist() if n not in (-1, prefix)]
        tokens = [np.zeros(0, dtype=np.int64), *(groups[n][2] for n in outer)]
        first = at = sum(map(len, tokens))
        local = np.full(self.tokens, -1)
        local[np.concatenate(tokens)] = np.arange(at)
        queries, seen = [], []
        # The trie is numbered depth first: by their last tokens its paths are in order. What has a number already, of
        # a trunk or of a row before, is where a path begins.
        for path in sorted(paths, key=lambda path: path[-1]):
            new = path[local[path] < 0]
            if len(new):
                local[new] = np.arange(at, at + len(new))
                at += len(new)
                tokens.append(new)
                queries.append(len(new))
                seen.append(path)
        positions = torch.from_numpy(self.positions[np.concatenate(tokens)])
        place = np.zeros(at, dtype=np.int64)
        place[local[needed]] = np.concatenate(columns)
        packed = torch.from_numpy(place)
        batch: dict[str, Any] = {"batch_shape": self.masks[i].shape, "real_index": torch.from_numpy(real)}
        own, keys = None, [len(path) for path in seen]
        if seen:
            is_whole = not first and queries == keys
            own = Layout.of_segments(
                queries,
                keys,
                **batch,
                source=None,
                packed_index=packed[first:],
                positions=positions[first:],
                key_index=None if is_whole else torch.from_numpy(local[np.concatenate(seen)]),
                spans=tuple((self.positions[[path[-1] for path in seen]] + 1).tolist()),
                positions_among=None if is_whole else positions,
            )
        return PrefixedLayout.of_segments(
            [at],
            [at],
            **batch,
            source=torch.from_numpy(local[source]).clamp(min=0),
            packed_index=packed,
            positions=positions,
            key_index=None,
            spans=(at,),
            own=own,
            outer=tuple(outer),
            is_prefix=prefix >= 0,
        )
