"""Parts of a batch: some of its rows, in the columns that hold more than padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .image_rows import ImageCounts, select_rows


if TYPE_CHECKING:
    from ...core.layout.shared_prefixes import PrefixPlan


__all__ = ["SplitRows", "chunk_batches", "scored_tokens", "used_columns"]


@dataclass(frozen=True, eq=False)
class SplitRows:
    """
    The rows of each part of a batch.

    Attributes:
        rows (`list[torch.Tensor]`): Numbers of the rows of each part.
        columns (`list[slice]`): The columns of each part that hold more than padding.
        plan ([`PrefixPlan`], *optional*): The prefixes that the parts share; `None` if they share none.
    """

    rows: list[torch.Tensor]
    columns: list[slice]
    plan: PrefixPlan | None = None


def used_columns(is_needed: torch.Tensor) -> slice:
    """Columns from the one before the first needed token (it may predict that token) to the last needed one."""
    columns = is_needed.any(0).nonzero()
    return slice(max(int(columns[0]) - 1, 0), int(columns[-1]) + 1) if len(columns) else slice(0, 1)


def chunk_batches(
    batch: Mapping[str, Any], split: SplitRows, rows_per_item: int, images: ImageCounts | None, count: int
) -> list[dict[str, Any]]:
    """The batch of each part of `count` rows: its rows, and for values per token also its columns."""
    shape = batch["input_ids"].shape if "input_ids" in batch else None
    chunks = []
    for rows, columns in zip(split.rows, split.columns, strict=True):
        chunk = select_rows(batch, rows, count, images, rows_per_item)
        for name, value in chunk.items():
            if isinstance(value, torch.Tensor) and value.dim() > 1 and batch[name].shape[:2] == shape:
                chunk[name] = value[:, columns]
        chunks.append(chunk)
    return chunks


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
