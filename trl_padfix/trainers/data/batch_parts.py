"""Parts of a batch: some of its rows, in the columns that hold more than padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .image_rows import ImageCounts, select_rows


if TYPE_CHECKING:
    from ...core.layout.shared_prefixes import PrefixPlan


__all__ = ["Parts", "scored_tokens"]


@dataclass(frozen=True, eq=False)
class Parts:
    """
    The parts into which the rows of a batch are split.

    Attributes:
        rows (`list[torch.Tensor]`): Numbers of the rows of each part.
        columns (`list[slice]`): The columns of each part that hold more than padding.
        count (`int`): Rows of the batch.
        rows_per_item (`int`): Rows that stay together.
        images ([`ImageCounts`] or `None`): Images of each row of the batch.
        plan ([`PrefixPlan`], *optional*): The prefixes that the parts share; `None` if they share none.
    """

    rows: list[torch.Tensor]
    columns: list[slice]
    count: int
    rows_per_item: int
    images: ImageCounts | None
    plan: PrefixPlan | None = None

    @classmethod
    def of_items(
        cls, items: Sequence[Sequence[int]], needed: torch.Tensor, rows_per_item: int, images: ImageCounts | None
    ) -> Parts:
        """
        Parts of some items each: item `i` of a batch has the rows `i`, `i + B / rows_per_item`, ...

        `needed`, `(B, L)`: the tokens that no part may lose.
        """
        firsts = range(0, len(needed), len(needed) // rows_per_item)
        rows = [torch.tensor([first + i for first in firsts for i in part], device=needed.device) for part in items]
        columns = [_used_columns(needed[numbers]) for numbers in rows]
        return cls(rows, columns, len(needed), rows_per_item, images)

    def of(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batch of each part: its rows, and for values per token also its columns."""
        shape = batch["input_ids"].shape if "input_ids" in batch else None
        parts = []
        for rows, columns in zip(self.rows, self.columns, strict=True):
            part = select_rows(batch, rows, self.count, self.images, self.rows_per_item)
            for name, value in part.items():
                if isinstance(value, torch.Tensor) and value.dim() > 1 and batch[name].shape[:2] == shape:
                    part[name] = value[:, columns]
            parts.append(part)
        return parts


def _used_columns(is_needed: torch.Tensor) -> slice:
    """Columns from the one before the first needed token (it may predict that token) to the last needed one."""
    columns = is_needed.any(0).nonzero()
    return slice(max(int(columns[0]) - 1, 0), int(columns[-1]) + 1) if len(columns) else slice(0, 1)


def scored_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """
    Mask of the tokens that a loss over labels or completions scores, `(B, L)`: never tokens of the first column.

    `None` if anything but such a loss reads the rows: then no column may be left out.
    """
    if [name for name in batch if name.endswith("input_ids")] != ["input_ids"]:
        return None
    scored = batch["labels"] != -100 if "labels" in batch else batch.get("completion_mask")
    if scored is None or scored.shape != batch["input_ids"].shape:
        return None
    return scored.bool() & (torch.arange(scored.shape[1], device=scored.device) > 0)
