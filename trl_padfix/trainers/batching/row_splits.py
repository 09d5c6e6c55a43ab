"""
The rows of a batch, split within a token budget.

The ids and masks of a batch, copied to the host once, decide how it is split. [`RowSplitter`] returns its [`Parts`].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.logging import get_logger

from ...core.call.batch_cache import on_host
from ...core.context import context
from ...core.layout.layout import move_maps
from ...core.layout.shared_prefixes import plan_shared_prefixes
from ..data.batch_rows import ImageCounts, Parts, has_pixels, split_images
from .bin_packing import RowCosts, batch_costs, halve_largest, pack_by_budget, pack_depth_first


__all__ = ["RowSplitter"]

logger = get_logger(__name__)


@dataclass(frozen=True)
class RowSplitter:
    """
    Splits the rows of a batch into parts within a token budget.

    Args:
        budget (`int`):
            Maximum number of tokens of a part.
        sharing (`bool`):
            Whether shared prefixes of the rows of a part count once.
        shares_across (`bool`):
            Whether prefixes that several parts share are computed once instead of by each part.
        sync_count (`Callable[[int], int]`, *optional*):
            Takes the number of parts that this process needs, and returns the number that all processes must have.
        gather (`Callable`, *optional*):
            Joins lists of all processes, which then plan shared prefixes together.
        meets_in_tower (`bool`):
            Whether processes that shard the model meet in its vision tower. Then either all rows of all processes must
            have images, or none.
    """

    budget: int
    sharing: bool
    shares_across: bool = False
    sync_count: Callable[[int], int] | None = None
    gather: Callable[[list], list] | None = None
    meets_in_tower: bool = False

    def can_split(self, batch: Mapping[str, Any], count: int, images: ImageCounts | None) -> bool:
        """Whether a batch of `count` rows has no images, or known images per row; the same on all processes."""
        has_images = has_pixels(batch)
        if self.sync_count is not None and self.meets_in_tower:
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
    ) -> Parts:
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
        items = self.pack(costs)
        if images is not None:
            # DDP reduces the gradients of the parameters that the last backward used, so parts with images come last.
            items.sort(key=lambda part: any(images["num_images"][item] for item in part))
        parts, plan = Parts.of_items(items, is_needed, rows_per_item, images), None
        if self.shares_across and has_ids and len(items) > 1:
            cut = [(host_ids[r][:, c], host_mask[r][:, c]) for r, c in zip(parts.rows, parts.columns, strict=True)]
            unmoved = plan_shared_prefixes(cut, self.budget, self.gather)
            plan = unmoved and move_maps(unmoved, ids.device)  # in one copy
        return replace(parts, rows=[numbers.to(ids.device) for numbers in parts.rows], plan=plan)

    def pack(self, costs: RowCosts) -> list[list[int]]:
        """The items of each part."""
        if (costs.tokens > self.budget).any() and context().stats is None:  # a comparison has a budget of its own
            logger.warning_once(
                f"Rows have more tokens than `max_tokens_per_batch={self.budget}`: each of them has its own forward, "
                "and needs memory for its length. Raise the budget, or shorten the rows. (Shown once.)"
            )
        pack = pack_depth_first if self.shares_across else pack_by_budget
        parts = pack(costs, self.budget)
        count = len(parts) if self.sync_count is None else self.sync_count(len(parts))
        # Processes have equally many rows, so each has enough of them for `count` parts.
        return halve_largest(parts, count)
