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
import torch
from accelerate.utils import gather_object
from datasets import Dataset

from ..data.collators import SidedCollator
from .costs import RowCosts, text_costs
from .measures import RowMeasure


__all__ = ["ImageMeasure", "check_images_of_processes", "measure_images"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageMeasure(RowMeasure):
    """
    Token costs of the rows of one dataset, counted before the first step.

    Rows count as if they had nothing in common, since only a forward finds out which images are the same. With
    sharing, what the sequences of one row have in common counts once.

    Attributes:
        tokens (`np.ndarray` of shape `(n, k)`): Tokens of the `k` sequences of each row, those of images among them.
        common (`np.ndarray` of shape `(n,)`): Tokens that the sequences of a row begin with in common.
        images (`np.ndarray` of shape `(n,)`): Images of each row.
    """

    tokens: np.ndarray
    common: np.ndarray
    images: np.ndarray

    def of(self, numbers: Sequence[int], examples: Sequence[dict[str, Any]]) -> RowCosts:
        return text_costs(self._each()[list(numbers)])

    def dataset(self, dataset: Dataset) -> RowCosts:
        return text_costs(self._each())

    def longest(self, dataset: Dataset) -> np.ndarray:
        return self.tokens.max(1)

    def check(self, numbers: Sequence[int], batch: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: If rows are longer or shorter than they were when they were counted.
        """
        now = _tokens(batch).view(-1, len(numbers)).T.numpy()
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

    def _each(self) -> np.ndarray:
        each = self.tokens.sum(1)
        return each - self.common if self.sharing else each


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
    and all get the counts of all. With `sharing` what the sequences of a row begin with in common counts once.
    """
    own: Any = replace(collator) if isinstance(collator, SidedCollator) else collator  # with odd rows of its own
    process, of = processes
    begin, end = (len(dataset) * p // of for p in (process, process + 1))
    found = dataset.select(range(begin, end)).map(
        partial(_count, collator=own),
        remove_columns=dataset.column_names,
        num_proc=workers,
        desc="Counting tokens of the train dataset with its images",
    )
    rows = gather_object([[r["tokens"], r["common"], r["images"]] for r in found])
    tokens, common, images = zip(*rows, strict=True)
    return ImageMeasure(
        sharing=sharing, tokens=np.array(tokens), common=np.array(common), images=np.array(images, dtype=np.int64)
    )


def check_images_of_processes(measure: ImageMeasure) -> None:
    """
    Raises:
        ValueError: If some rows have images and some have none.
    """
    without = np.flatnonzero(measure.images == 0)
    if 0 < len(without) < len(measure.images):
        raise ValueError(
            f"{len(without)} of {len(measure.images)} rows of the train dataset have no image (row {without[0]}). "
            "With `max_tokens_per_batch` a process would compute some micro-batches without the layers that see "
            "images, while others wait for it there. Leave these rows out, or the budget, or train in one process."
        )


def _count(example: dict[str, Any], collator: Callable[[list[dict[str, Any]]], Any]) -> dict[str, Any]:
    images = example.get("images", example.get("image"))
    count = len(images) if isinstance(images, list) else int(images is not None)
    batch = collator([example])
    return {"tokens": _tokens(batch).tolist(), "common": _common(batch), "images": count}


def _tokens(batch: Any) -> torch.Tensor:
    if not isinstance(batch, Mapping) or not isinstance(batch.get("attention_mask"), torch.Tensor):
        raise ValueError(
            "`max_tokens_per_batch` counts the tokens of rows with images by the `attention_mask` of their batch, and "
            "the collator makes none. Leave the budget out, or use the default collator."
        )
    return batch["attention_mask"].sum(1)


def _common(batch: Mapping[str, Any]) -> int:
    """Tokens that the prompts of two sequences begin with in common; 0 for one sequence."""
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    if len(ids) != 2:
        return 0
    completion = batch.get("completion_mask", torch.zeros_like(ids)).bool()
    one, other = (row[keep] for row, keep in zip(ids, mask & ~completion, strict=True))
    least = min(len(one), len(other))
    return int((one[:least] == other[:least]).cumprod(0).sum())
