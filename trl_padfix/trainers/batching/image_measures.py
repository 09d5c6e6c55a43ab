"""
Token counts of rows with images.

Only the collator can count them: it renders the messages, and the processor inserts the tokens of an image. So every
row is collated once, by itself, before the first step; `datasets` caches the counts beside the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset

from ..data.collators import SidedCollator
from ..data.image_rows import count_images
from .measures import RowMeasure
from .prefix_groups import shared_prefix_lengths
from .token_costs import RowCosts, text_costs


__all__ = ["ImageMeasure", "measure_images"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageMeasure(RowMeasure):
    """
    Token costs of the rows of one dataset, counted before the first step.

    Rows count as if they shared nothing, because equal images are only found in a forward.

    Attributes:
        sequence_tokens (`np.ndarray` of shape `(n, k)`):
            Tokens of the `k` sequences of each row, those of images among them.
        tokens (`np.ndarray` of shape `(n,)`): Tokens of each row; with sharing its prompt counts once.
        images (`np.ndarray` of shape `(n,)`): Images of each row.
    """

    sequence_tokens: np.ndarray
    tokens: np.ndarray
    images: np.ndarray

    def costs(self, rows: Dataset | Sequence[dict[str, Any]]) -> RowCosts:
        return text_costs(self.tokens)

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        return text_costs(self.tokens[list(numbers)])

    def longest(self, rows: Dataset | Sequence[dict[str, Any]]) -> np.ndarray:
        return self.sequence_tokens.max(1)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if the token counts of rows differ from those before the first step."""
        now = batch["attention_mask"].sum(1).view(-1, len(numbers)).T.numpy()
        before = self.sequence_tokens[list(numbers)]
        changed = np.flatnonzero((now != before).any(1))
        if len(changed):
            index = changed[0]
            raise ValueError(
                f"Row {numbers[index]} of the train dataset has {now[index].tolist()} tokens, and had "
                f"{before[index].tolist()} before the first step, from which `max_tokens_per_batch` planned the "
                "epoch. Is a part of it drawn at random (`set_transform`, a collator that crops)? Give images their "
                "size in the data, or leave the budget out."
            )


def measure_images(
    dataset: Dataset,
    collator: Callable[[list[dict[str, Any]]], Any],
    *,
    sharing: bool = False,
    processes: tuple[int, int] = (0, 1),
    workers: int | None = None,
) -> ImageMeasure:
    """
    Collate every row of a dataset once, and count its tokens.

    Args:
        dataset (`Dataset`):
            Rows with images.
        collator (`Callable`):
            Makes a batch of examples.
        sharing (`bool`, *optional*, defaults to `False`):
            Whether the prompt of a pair counts once.
        processes (`tuple[int, int]`, *optional*):
            Number of this process, and of all: each collates a part of the rows, and all get all counts.
        workers (`int`, *optional*):
            Workers of each process.
    """
    # A copy, so that invalid rows are not counted here and again in training.
    counter: Any = replace(collator) if isinstance(collator, SidedCollator) else collator
    process, count = processes
    begin, end = (len(dataset) * p // count for p in (process, process + 1))
    counts = dataset.select(range(begin, end)).map(
        partial(_count, collator=counter, sharing=sharing),
        remove_columns=dataset.column_names,
        num_proc=workers,
        desc="Counting tokens of the train dataset with its images",
    )
    rows = gather_object(list(counts))
    return ImageMeasure(
        **{name: np.array([row[name] for row in rows]) for name in ("sequence_tokens", "tokens", "images")}
    )


def _count(example: dict[str, Any], collator: Callable[[list[dict[str, Any]]], Any], sharing: bool) -> dict[str, Any]:
    count = count_images(example) or 0
    batch = collator([example])
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    tokens = int(mask.sum())
    if sharing and len(ids) == 2:
        prompts = mask & (batch["completion_mask"] == 0)
        chosen, rejected = (row[keep].numpy() for row, keep in zip(ids, prompts, strict=True))
        tokens -= int(shared_prefix_lengths([chosen], [rejected]).sum())
    return {"sequence_tokens": mask.sum(1).tolist(), "tokens": tokens, "images": count}
