"""
Token costs of rows, and bin packing by them: parts of a batch under a token budget, processes with similar costs.

The ids and masks of a batch, copied to the host once, decide how [`RowSplitter`] splits it.

A row is the unit in which a trainer counts its batches: a preference pair, or a text. Its cost is the tokens that it
puts through the decoder, where a prefix that it shares with other rows is computed once ([`RowCosts`]).

The functions are pure, so every process finds the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset

from ...core.call.batch_cache import on_host
from ...core.context import context
from ...core.layout.build import common_bytes, sort_rows
from ...core.layout.layout import move_maps
from ...core.layout.shared_prefixes import KV_MEMORY_FRACTION, MIN_SAVED_TOKENS, plan_shared_prefixes
from ..data.batch_rows import BatchParts, ImageCounts, has_pixels, split_images
from ..data.columns import lists


__all__ = [
    "RowCosts", "RowSplitter", "dataset_costs", "pack_rows", "partition_equal_rows", "prefix_costs", "sort_by_prefix",
    "text_costs", "truncated_tokens",
]  # fmt: skip


logger = get_logger(__name__)

MIN_SHARED_FRACTION = 0.1
"""Rows belong to one group if they share this fraction of the shorter row's tokens, or more."""


@dataclass(frozen=True, eq=False)
class RowCosts:
    """
    Tokens that rows put through the decoder, where shared prefixes are computed once.

    Attributes:
        tokens (`np.ndarray` of shape `(n,)`): Tokens of each row in a batch of its own.
        order (`np.ndarray` of shape `(n,)`): The rows, sorted so that those with a shared prefix are adjacent.
        shared (`np.ndarray` of shape `(n,)`): Tokens that each row of `order` shares with the one before it (the LCP
            array of the sorted rows).
    """

    tokens: np.ndarray
    order: np.ndarray
    shared: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> RowCosts:
        """The costs of some rows; a row may be named more than once."""
        rows = np.arange(len(self))[rows]
        rank = self.order.argsort()  # inverse permutation
        order = np.argsort(rank[rows], kind="stable")
        return RowCosts(self.tokens[rows], order, self._shared_in_subset(rank[rows[order]]))

    def _shared_in_subset(self, ranks: np.ndarray) -> np.ndarray:
        """
        Shared prefixes of the sorted rows at ascending `ranks`: for two rows that are not adjacent, the minimum of
        `shared` between them. With `shared` `[0, 5, 3]`, ranks `[0, 2]` give `[0, 3]`.
        """
        shared = np.zeros(len(ranks), dtype=np.int64)
        if len(ranks) > 1:
            minimum = np.minimum.reduceat(np.append(self.shared, 0), ranks + 1)[:-1]
            # A row that is selected twice, as when accelerate fills the last step, counts in full both times.
            shared[1:] = np.where(np.diff(ranks), minimum, 0)
        return shared

    @property
    def shared_by_all(self) -> int:
        """Tokens that all rows begin with in common; 0 for a single row."""
        return int(self.shared[1:].min(initial=self.tokens.max(initial=0))) if len(self) > 1 else 0

    def without_shared(self, tokens: int) -> RowCosts:
        """The costs without the first `tokens` of each row, which all of them share."""
        return RowCosts(self.tokens - tokens, self.order, np.maximum(self.shared - tokens, 0))

    @property
    def same_group(self) -> np.ndarray:
        """Whether each row of `order` is in the group of the one before it, `(n,)`; ignores the prefix of all rows."""
        costs = self.without_shared(self.shared_by_all)
        tokens, shared = costs.tokens[costs.order], costs.shared
        return (shared > 0) & (shared >= MIN_SHARED_FRACTION * np.minimum(tokens, np.roll(tokens, 1)))

    def total(self, rows: Any = slice(None)) -> int:
        """Tokens of one batch of `rows`."""
        costs = self[rows]
        return int(costs.tokens.sum() - costs.shared.sum())


def truncated_tokens(
    lengths: np.ndarray, prompts: np.ndarray, max_length: int | None = None, truncation_mode: str = "keep_start"
) -> tuple[np.ndarray, np.ndarray]:
    """
    Tokens of rows after truncation, and how many of their first tokens other rows may share.

    Args:
        lengths (`np.ndarray` of shape `(k, n)`):
            Tokens of the `k` sequences of each row.
        prompts (`np.ndarray` of shape `(n,)`):
            Tokens of the prompt with which the sequences of each row begin. Other rows may share it.
        max_length (`int`, *optional*):
            Tokens that are kept of a sequence.
        truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            With `"keep_end"` a truncated sequence loses its beginning, so it shares nothing.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: both of shape `(n,)`.
    """
    limit = np.iinfo(np.int64).max if max_length is None else max_length
    prompts = np.minimum(prompts, limit)
    if truncation_mode == "keep_end":
        prompts = np.where((lengths <= limit).all(0), prompts, 0)
    return np.minimum(lengths, limit).sum(0), prompts


def text_costs(tokens: Sequence[int] | np.ndarray) -> RowCosts:
    """Costs of rows that share nothing."""
    tokens = np.asarray(tokens, dtype=np.int64)
    return RowCosts(tokens, np.arange(len(tokens)), np.zeros_like(tokens))


def prefix_costs(tokens: np.ndarray, shareable: np.ndarray, order: np.ndarray, shared: np.ndarray) -> RowCosts:
    """
    Costs of rows of `tokens`; other rows may share the first `shareable`. All arrays are `(n,)`.

    `order` and `shared` come from [`sort_by_prefix`].
    """
    return RowCosts(tokens, order, np.minimum(shared, np.minimum(shareable[order], np.roll(shareable[order], 1))))


def sort_by_prefix(ids: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """
    Sort rows by their token ids. Returns their order, and the number of tokens that each sorted row shares with the
    one before it: `[[1, 2], [3], [1, 2, 4]]` give `[0, 2, 1]` and `[0, 2, 0]`.
    """
    order, common = sort_rows([_key(row) for row in ids], width=4)
    return np.array(order, dtype=np.int64), np.array(common, dtype=np.int64)


def _key(ids: np.ndarray) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()  # bytes of big-endian numbers sort like the numbers


def dataset_costs(
    rows: Dataset,
    sequences: Sequence[tuple[str, ...]],
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    sharing: bool = False,
) -> RowCosts:
    """
    Costs of the tokenized rows of a dataset.

    Args:
        rows ([`~datasets.Dataset`]):
            The rows.
        sequences (`Sequence[tuple[str, ...]]`):
            The columns of each sequence of a row, in their order: for a pair `("prompt_ids", "chosen_ids")` and
            `("prompt_ids", "rejected_ids")`. Only the first column counts for shared prefixes.
        max_length (`int`, *optional*), truncation_mode (`str`, *optional*, defaults to `"keep_start"`):
            As in [`truncated_tokens`].
        sharing (`bool`, *optional*, defaults to `False`):
            Whether shared prefixes are computed once.
    """
    names = dict.fromkeys(chain(*sequences))
    columns = {name: list(lists(rows, name)) for name in names}
    lengths = {name: np.array([len(ids) for ids in ids_of_rows]) for name, ids_of_rows in columns.items()}
    begins = [columns[names[0]] for names in sequences]
    tokens, shareable = truncated_tokens(
        np.stack([np.sum([lengths[name] for name in names], axis=0) for names in sequences]),
        lengths[sequences[0][0]],
        max_length,
        truncation_mode,
    )
    return _shared_costs(begins, tokens, shareable) if sharing else text_costs(tokens)


def batch_costs(ids: torch.Tensor, mask: torch.Tensor, rows_per_item: int, sharing: bool) -> RowCosts:
    """
    Costs of the items of a padded batch on the host.

    Args:
        ids (`torch.Tensor` of shape `(B, L)`):
            Token IDs, block by block: item `i` has the rows `i`, `i + B / rows_per_item`, ...
        mask (`torch.Tensor` of shape `(B, L)`):
            1 at real tokens.
        rows_per_item (`int`):
            Rows of an item.
        sharing (`bool`):
            Whether shared prefixes are computed once.
    """
    rows = [row[keep] for row, keep in zip(ids.numpy(), mask.numpy().astype(bool), strict=True)]
    items = len(rows) // rows_per_item
    blocks = [rows[begin : begin + items] for begin in range(0, len(rows), items)]
    lengths = np.array([[len(row) for row in block] for block in blocks])
    tokens = lengths.sum(0)
    return _shared_costs(blocks, tokens, lengths[0]) if sharing else text_costs(tokens)


def _shared_costs(begins: Sequence[Sequence[np.ndarray]], tokens: np.ndarray, shareable: np.ndarray) -> RowCosts:
    """
    Costs of rows of `tokens`, where shared prefixes are computed once.

    `begins` has the ids with which each sequence of a row begins: `k` lists, one per sequence, each with `n` rows.
    Other rows may share the first `shareable` ids of the first sequence.
    """
    first, *others = begins
    for other in others:  # the sequences of a row share among themselves, too
        pairs = zip(first, other, strict=True)
        common = np.array([common_bytes(_key(a), _key(b)) // 4 for a, b in pairs], dtype=np.int64)
        tokens = tokens - np.minimum(common, shareable)
    return prefix_costs(tokens, shareable, *sort_by_prefix(first))


class RowGroup(NamedTuple):
    """Rows that stay together, and their tokens."""

    tokens: float
    rows: list[int]


def pack_rows(costs: RowCosts, budget: int, across: bool) -> list[list[int]]:
    """
    Pack rows into about as few parts of at most `budget` tokens as possible.

    Rows with a shared prefix stay together if they fit. A row with more tokens is a part of its own. Returns the rows
    of each part, the part with the most tokens first.

    With `across` the parts share prefixes, and each prefix is computed once. A part then has at most `budget` tokens
    including the prefixes that it shares with other parts. If it is faster, the activations of a prefix are freed and
    later recomputed; the prefix then counts [`KV_MEMORY_FRACTION`] of its tokens. The order is depth-first in the
    prefix tree: parts that share a prefix are adjacent.
    """
    parts = [sorted(group.rows) for group in _pack_subtree(costs, budget, across)]
    return parts if across else sorted(parts, key=costs.total, reverse=True)


def _pack_subtree(costs: RowCosts, budget: float, across: bool) -> list[RowGroup]:
    """
    Parts of rows that all begin with one prefix (or none), with their tokens.

    `across`: whether prefixes are computed once for all parts, so that they can be recomputed ([`pack_rows`]).
    """
    shared = costs.shared_by_all
    rest = costs.without_shared(shared)
    total, shortest = rest.total(), max(int(rest.tokens.min()), 1)
    room_if_kept, room_if_recomputed = rooms = (budget - shared, budget - shared * KV_MEMORY_FRACTION)
    count_if_kept, count_if_recomputed = (-(-total // max(room, shortest)) for room in rooms)
    # To recompute a prefix costs 1/3 of a step on its tokens (forward + backward = 3 forwards). Each part fewer saves
    # about as much as computing `MIN_SAVED_TOKENS`. A prefix that saves fewer tokens has no forward of its own
    # (`find_shared_prefixes`): each part computes it, with its activations.
    is_shared = shared * (count_if_recomputed - 1) >= MIN_SAVED_TOKENS
    recompute = across and is_shared and MIN_SAVED_TOKENS * (count_if_kept - count_if_recomputed) > shared / 3
    room = room_if_recomputed if recompute else room_if_kept
    prefix_tokens = shared * KV_MEMORY_FRACTION if recompute else shared
    bins: list[RowGroup] = []
    fitting: list[RowGroup] = []
    for group in _groups(rest):
        if group.tokens <= room or len(group.rows) == 1:
            fitting.append(group)
        else:
            parts = _pack_subtree(rest[group.rows], room, across)
            bins += [RowGroup(part.tokens, [group.rows[i] for i in part.rows]) for part in parts]
    first_mixed = len(bins)  # bins before this one are parts of one group
    _first_fit(_largest_first(fitting), room, bins)
    if recompute:
        _make_last_bin_small(bins, first_mixed, room_if_kept, rest)
    return [RowGroup(tokens + prefix_tokens, rows) for tokens, rows in bins]


def _make_last_bin_small(bins: list[RowGroup], first_mixed: int, room: float, costs: RowCosts) -> None:
    """
    Reorder or split `bins`, so that the last one has at most `room` tokens if possible.

    A prefix is recomputed for its last part, which holds the activations of the prefix and its own. Only bins from
    `first_mixed` on may move: earlier bins are in depth-first order.
    """
    if bins[-1].tokens <= room:
        return
    small = next((i for i in range(first_mixed, len(bins)) if bins[i].tokens <= room), None)
    if small is not None:
        bins.append(bins.pop(small))
    elif len(bins[-1].rows) > 1:
        tokens, rows = bins.pop()
        last = next(row for row in costs.order[::-1].tolist() if row in rows)
        bins.append(RowGroup(tokens, [row for row in rows if row != last]))
        bins.append(RowGroup(int(costs.tokens[last]), [last]))


def halve_largest(parts: Sequence[list[int]], count: int) -> list[list[int]]:
    """
    Cut the part with the most rows in two, until there are `count` parts. There are at least as many rows.

    `[[7, 8, 9], [5]]` and 3 give `[[7], [8, 9], [5]]`.
    """
    halved = list(parts)
    while len(halved) < count:
        rows = max(halved, key=len)
        index, middle = halved.index(rows), len(rows) // 2
        halved[index : index + 1] = [rows[:middle], rows[middle:]]
    return halved


def partition_equal_rows(costs: RowCosts, processes: int, quadratic: float = 0.0) -> list[list[int]]:
    """
    Give each process equally many rows, at costs as equal as possible. Returns the rows of each, ascending.

    A row of `n` tokens costs `n + quadratic * n * n`, minus what it shares.

    Rows with a shared prefix go to one process; if no process has room for all of them, to as few as possible.
    The number of rows is a multiple of `processes`.
    """
    room = np.full(processes, len(costs) // processes)
    loads = np.zeros(processes)
    partition: list[list[int]] = [[] for _ in range(processes)]
    beyond = quadratic * costs.tokens.astype(float) ** 2
    costs = costs.without_shared(costs.shared_by_all)
    groups = [RowGroup(group.tokens + beyond[group.rows].sum(), group.rows) for group in _groups(costs)]
    for size, rows in _largest_first(groups):
        is_cut = False
        while rows:
            # The process with the fewest tokens among those with room for all rows, or with any room.
            has_room = room >= len(rows)
            has_room = has_room if has_room.any() else room > 0
            index = int(np.where(has_room, loads, np.inf).argmin())
            taken, rows = rows[: room[index]], rows[room[index] :]
            is_cut = is_cut or bool(rows)
            partition[index] += taken
            room[index] -= len(taken)
            loads[index] += costs.total(taken) + beyond[taken].sum() if is_cut else size
    return [sorted(rows) for rows in partition]


def _groups(costs: RowCosts) -> list[RowGroup]:
    """The rows of each group (see [`RowCosts.same_group`]), and their tokens in one batch."""
    if not len(costs):
        return []
    first = np.flatnonzero(~costs.same_group)
    tokens = costs.tokens[costs.order] - np.where(costs.same_group, costs.shared, 0)
    groups = np.split(costs.order, first[1:])
    sizes = np.add.reduceat(tokens, first).tolist()
    return [RowGroup(size, rows.tolist()) for size, rows in zip(sizes, groups, strict=True)]


def _largest_first(groups: list[RowGroup]) -> list[RowGroup]:
    return sorted(groups, key=lambda group: group.tokens, reverse=True)


def _first_fit(groups: list[RowGroup], room: float, bins: list[RowGroup]) -> None:
    """Add each of the groups, in their order, to the first of `bins` in which it fits, or to a new one."""
    for group in groups:
        index = next((i for i, other in enumerate(bins) if other.tokens + group.tokens <= room), None)
        if index is None:
            bins.append(group)
        else:
            bins[index] = RowGroup(bins[index].tokens + group.tokens, bins[index].rows + group.rows)


@dataclass(frozen=True)
class RowSplitter:
    """
    Splits the rows of a batch into parts within a token budget.

    Args:
        budget (`int`):
            Maximum number of tokens of a part.
        sharing (`bool`):
            Whether shared prefixes of the rows of a part count once.
        shares_across (`Callable[[], bool]`, *optional*, defaults to `bool`):
            Returns whether prefixes that several parts share are computed once instead of by each part; called if a
            batch is over the budget.
        sync_count (`Callable[[int], int]`, *optional*, defaults to `int`):
            Takes a number of this process, and returns the largest one of all processes that need equally many parts.
        gather (`Callable`, *optional*):
            Joins lists of all processes, which then plan shared prefixes together.
        meets_in_tower (`bool`):
            Whether processes that shard the model meet in its vision tower. Then either all rows of all processes must
            have images, or none.
    """

    budget: int
    sharing: bool
    shares_across: Callable[[], bool] = bool
    sync_count: Callable[[int], int] = int
    gather: Callable[[list], list] | None = None
    meets_in_tower: bool = False

    def can_split(self, batch: Mapping[str, Any], count: int, images: ImageCounts | None) -> bool:
        """Whether a batch of `count` rows has no images, or known images per row; the same on all processes."""
        has_images = has_pixels(batch)
        if self.meets_in_tower:
            lacks_images = images is None or not all(images["num_images"])
            if self.sync_count(int(has_images)) and self.sync_count(int(not has_images or lacks_images)):
                return False
        return not has_images or split_images(batch, count, images) is not None

    def split(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        rows_per_item: int = 1,
        scored: torch.Tensor | None = None,
        images: ImageCounts | None = None,
    ) -> BatchParts:
        """
        Split a batch by its values on the host.

        Args:
            ids (`torch.Tensor` of shape `(B, L)`):
                Token IDs; or embeddings `(B, L, H)`, which share nothing.
            mask (`torch.Tensor` of shape `(B, L)`, *optional*):
                1 at real tokens. Without a mask no token is padding, and rows share nothing.
            rows_per_item (`int`, *optional*, defaults to 1):
                Rows that stay together: item `i` has the rows `i`, `i + B / rows_per_item`, ...
            scored (`torch.Tensor` of shape `(B, L)`, *optional*):
                1 at tokens that the loss scores. Without it no column is left out.
            images ([`ImageCounts`], *optional*):
                Images of each row. Rows with equal ids may have different images, so they share nothing.
        """
        has_ids = ids.dim() == 2 and mask is not None and images is None
        host_ids, host_mask, host_scored = on_host(ids if ids.dim() == 2 else None, mask, scored)
        host_ids = torch.zeros(ids.shape[:2], dtype=torch.long) if host_ids is None else host_ids
        host_mask = torch.ones_like(host_ids) if host_mask is None else host_mask
        is_needed = torch.ones_like(host_ids) if scored is None else host_mask.bool() | host_scored.bool()
        costs = batch_costs(host_ids, host_mask, rows_per_item, self.sharing and has_ids)
        # Recurrent layers compute rows with masked tokens between real ones padded, and then read no prefix states.
        has_holes = bool(((host_mask != 0).int().diff(dim=1) == 1).sum(1).gt((host_mask[:, 0] == 0).int()).any())
        is_over = self.sync_count(int(costs.total() > self.budget))
        across = bool(is_over) and self.shares_across() and has_ids and not self.sync_count(int(has_holes))
        items = self.pack(costs, across)
        if images is not None:
            # DDP reduces the gradients of the parameters that the last backward used, so parts with images come last.
            items.sort(key=lambda part: any(images["num_images"][item] for item in part))
        parts, plan = BatchParts.of_items(items, is_needed, rows_per_item, images), None
        if across and len(items) > 1:
            cut = [(host_ids[r][:, c], host_mask[r][:, c]) for r, c in zip(parts.rows, parts.columns, strict=True)]
            unmoved = plan_shared_prefixes(cut, self.budget, self.gather)
            plan = unmoved and move_maps(unmoved, ids.device)  # in one copy
        return replace(parts, rows=[numbers.to(ids.device) for numbers in parts.rows], plan=plan)

    def pack(self, costs: RowCosts, across: bool = False) -> list[list[int]]:
        """The items of each part; `across` as in [`pack_rows`]."""
        if (costs.tokens > self.budget).any() and context().stats is None:  # a comparison has a budget of its own
            logger.warning_once(
                f"Some rows have more tokens than `max_tokens_per_batch={self.budget}`: each has its own forward, "
                "and needs memory for its length. Raise the budget, or shorten the rows. (Shown once.)"
            )
        parts = pack_rows(costs, self.budget, across)
        count, fewest = self.sync_count(len(parts)), -self.sync_count(-len(costs))
        if count > fewest:  # a collator dropped some
            logger.warning_once(
                f"`max_tokens_per_batch` needs {count} sub-batches, but a process has only {fewest} rows. Sharded "
                "processes compute equally many, so each computes its batch whole. (Shown once.)"
            )
            return [list(range(len(costs)))]
        return halve_largest(parts, count)
