"""
Token counts of rows with images.

Only their collator knows them: it renders the messages, and the processor says how many tokens stand for an image. So
every row is collated once, by itself, before the first step; `datasets` keeps the counts where it keeps the data.
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
from .measures import RowMeasure
from .prefix_groups import shared_prefix_lengths
from .token_costs import RowCosts, text_costs


__all__ = ["ImageMeasure", "check_images_of_processes", "measure_images"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageMeasure(RowMeasure):
    """
    Token costs of the rows of one dataset, counted before the first step.

    Rows count as if they had nothing in common, since only a forward finds out which images are the same.

    Attributes:
        tokens (`np.ndarray` of shape `(n, k)`): Tokens of the `k` sequences of each row, those of images among them.
        each (`np.ndarray` of shape `(n,)`): Tokens of each row; with sharing its prompt counts once.
        images (`np.ndarray` of shape `(n,)`): Images of each row.
    """

    tokens: np.ndarray
    each: np.ndarray
    images: np.ndarray

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        return text_costs(self.each[list(numbers)])

    def dataset(self, dataset: Dataset) -> RowCosts:
        return text_costs(self.each)

    def longest(self, dataset: Dataset) -> np.ndarray:
        return self.tokens.max(1)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if rows are longer or shorter than they were when they were counted."""
        now = batch["attention_mask"].sum(1).view(-1, len(numbers)).T.numpy()
        before = self.tokens[list(numbers)]
        odd = np.flatnonzero((now != before).any(1))
        if len(odd):
            at = odd[0]
            raise ValueError(
                f"Row {numbers[at]} of the train dataset has {now[at].tolist()} tokens, and had {before[at].tolist()} "
                "before the first step, by which `max_tokens_per_batch` planned the epoch. Is a part of it drawn at "
                "random (`set_transform`, a collator that crops)? Give images their size in the data, or leave the "
                "budget out."
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
    Collate every row of a dataset once, and keep its token counts.

    `processes` says which process this is, and of how many: each collates a part of the rows, with so many `workers`,
    and all get the counts of all.
    """
    own: Any = replace(collator) if isinstance(collator, SidedCollator) else collator  # with odd rows of its own
    process, of = processes
    begin, end = (len(dataset) * p // of for p in (process, process + 1))
    found = dataset.select(range(begin, end)).map(
        partial(_count, collator=own, sharing=sharing),
        remove_columns=dataset.column_names,
        num_proc=workers,
        desc="Counting tokens of the train dataset with its images",
    )
    rows = gather_object(list(found))
    return ImageMeasure(**{name: np.array([row[name] for row in rows]) for name in ("tokens", "each", "images")})


def check_images_of_processes(measure: ImageMeasure) -> None:
    """Raise a `ValueError` if some rows have images and some have none."""
    without = np.flatnonzero(measure.images == 0)
    if 0 < len(without) < len(measure.images):
        raise ValueError(
            f"{len(without)} of {len(measure.images)} rows of the train dataset have no image (row {without[0]}). "
            "With `max_tokens_per_batch` a process would compute some micro-batches without the layers that see "
            "images, while others wait for it there. Leave these rows out, or the budget, or train in one process."
        )


def _count(example: dict[str, Any], collator: Callable[[list[dict[str, Any]]], Any], sharing: bool) -> dict[str, Any]:
    images = example.get("images", example.get("image"))
    count = len(images) if isinstance(images, list) else int(images is not None)
    batch = collator([example])
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    each = int(mask.sum())
    if sharing and len(ids) == 2:
        prompts = mask & (batch["completion_mask"] == 0)
        one, other = (row[keep].numpy() for row, keep in zip(ids, prompts, strict=True))
        each -= int(shared_prefix_lengths([one], [other]).sum())
    return {"tokens": mask.sum(1).tolist(), "each": each, "images": count}
