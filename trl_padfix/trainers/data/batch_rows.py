"""
Some rows of a batch, or its parts, with their images: processors concatenate the images of all rows.

Also which tokens a loss on a batch scores, and whether it scores any of them from padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PretrainedConfig

from ...core.call.batch_cache import on_host
from ...core.layout.shared_prefixes import PrefixPlan
from ...core.patches.heads import follow_padding


__all__ = [
    "PREFIXES", "BatchParts", "ImageCounts", "are_cut_by_rows", "find_images", "has_pixels",
    "numbered_images", "scored_tokens", "scores_padding", "select_rows", "split_images", "without_images",
]  # fmt: skip

PREFIXES = ("", "KL_")
"""Prefixes of the names in a batch, one for each forward of the policy: `KL_` marks KTO's mismatched completions."""

_READ = ("labels", "completion_mask", "input_ids", "attention_mask")

ImageCounts = Mapping[str, Sequence[int]]
"""`num_images` of each row of a batch, and `num_tiles` where a processor cuts images, by TRL's names."""

_OF_IMAGES = ("pixel_", "image_", "spatial_shapes", "num_tiles")
"""Prefixes of the names of a model's image arguments."""

_WITHOUT_ROWS = {"cache_position", "logits_to_keep"}
"""Arguments with one value per column; a batch may have as many columns as rows."""


def numbered_images(values: Mapping[str, Any]) -> dict[str, list[int]]:
    """Numbers of images and tiles of each row, from TRL's batches or the arguments of its methods."""
    return {name: values[name] for name in ("num_images", "num_tiles") if isinstance(values.get(name), list)}


def find_images(batch: Mapping[str, Any], ids: torch.Tensor, config: PretrainedConfig) -> ImageCounts | None:
    """
    The images of each row, found by the image tokens in `ids` `(B, L)`; `None` without images, or if it is unknown
    which images belong to which row.
    """
    pixels = batch.get("pixel_values")
    if counts := numbered_images(batch):
        return counts
    if not isinstance(pixels, torch.Tensor):
        return None
    named = config.to_dict()  # of a composite model
    image_id = next((named[name] for name in ("image_token_id", "image_token_index") if name in named), None)
    if image_id is None:
        return None
    is_image = ids == image_id
    begins = is_image & ~is_image.roll(1, dims=1)
    begins[:, 0] = is_image[:, 0]
    tokens, runs = torch.stack([is_image.sum(1), begins.sum(1)]).tolist()
    if pixels.dim() == 5 and batch.get("image_sizes") is None:  # an entry for each row already
        return {"num_images": [int(count > 0) for count in tokens]}
    grid = batch.get("image_grid_thw")
    patches = [1] * len(pixels) if grid is None else grid.prod(1).tolist()
    counts = _images_by_tokens(tokens, patches)
    if counts is None and sum(runs) == len(patches):  # images of different sizes, apart from one another
        counts = runs
    return None if counts is None else {"num_images": counts}


def _images_by_tokens(tokens: Sequence[int], patches: Sequence[int]) -> list[int] | None:
    """
    Number of images of each row, from the image tokens of the rows and the patches of the images, in their order.

    Each token stands for equally many patches: rows of `[4, 0, 8]` tokens and images of `[16, 16, 16]` patches have
    `[1, 0, 2]` images. `None` if an image would belong to two rows.
    """
    ends = {end * sum(tokens): number for number, end in enumerate([0, *accumulate(patches)])}
    found = [ends.get(end * sum(patches)) for end in [0, *accumulate(tokens)]]
    if not sum(tokens) or None in found:
        return None
    return [end - begin for begin, end in pairwise(number for number in found if number is not None)]


def without_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The text of a batch."""
    return {name: value for name, value in batch.items() if not name.startswith(_OF_IMAGES)}


def has_pixels(batch: Mapping[str, Any]) -> bool:
    """Whether a batch has images."""
    return batch.get("pixel_values") is not None


def split_images(batch: Mapping[str, Any], count: int, counts: ImageCounts | None) -> dict[str, Any] | None:
    """
    The batch of `count` rows with a list of images, an entry for each row, in place of the tensors of all images.

    `None` if it is unknown which images belong to which row. Processors that pad the images of a row (Idefics) have
    an entry for each row already.
    """
    if not has_pixels(batch):
        return dict(batch)
    if counts is None or len(counts["num_images"]) != count:
        return None
    pixels = batch["pixel_values"]
    # With `image_sizes` (LLaVA-NeXT) the second dimension holds the tiles of an image, and not the images of a row.
    if isinstance(pixels, torch.Tensor) and pixels.dim() == 5 and batch.get("image_sizes") is None:
        return dict(batch) if len(pixels) == count else None
    from trl.trainer.utils import split_pixel_values_by_grid  # the callback serves environments without TRL

    given = {name: value for name, value in batch.items() if value is not None}
    try:
        split = split_pixel_values_by_grid(given | {name: list(n) for name, n in counts.items()})
    except (RuntimeError, ValueError):  # the images do not match the counts
        return None
    added = counts.keys() - batch.keys()
    return {k: v for k, v in split.items() if k not in added} if isinstance(split["pixel_values"], list) else None


def select_rows(
    batch: Mapping[str, Any], rows: torch.Tensor, count: int, counts: ImageCounts | None = None, rows_per_item: int = 1
) -> dict[str, Any]:
    """
    Some rows of a batch of `count`, with their images; values without an entry for each row are not cut.

    With `rows_per_item` the rows come block by block (chosen, rejected), and a value may have an entry for each item.
    """
    split = split_images(batch, count, counts)
    assert split is not None  # the caller asked
    numbers, items = rows.tolist(), rows[: len(rows) // rows_per_item]
    for name, value in split.items():
        if name in _WITHOUT_ROWS:
            continue
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == count:
            split[name] = value[rows]
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) * rows_per_item == count:
            split[name] = value[items]
        elif isinstance(value, list) and len(value) == count:
            # A list of tensors has one per layer, unless it was made above.
            has_layers = value is batch[name] and any(isinstance(x, torch.Tensor) for x in value)
            split[name] = value if has_layers else [value[i] for i in numbers]
    # Without pixels a model computes text; with an empty tensor its vision tower would fail.
    if has_pixels(split) and counts is not None and not any(counts["num_images"][i] for i in numbers):
        return without_images(split)
    if not has_pixels(split):
        return split
    from trl.trainer.utils import unsplit_pixel_values_by_grid

    return unsplit_pixel_values_by_grid(split)


def are_cut_by_rows(batch: Mapping[str, Any], count: int, rows_per_item: int) -> bool:
    """Whether all values of a batch of `count` rows are images, plain values, or have one entry per row or item."""
    entries = {count, count // rows_per_item}
    return all(
        len(value) in entries if isinstance(value, list) else value.dim() == 0 or len(value) in entries
        for name, value in batch.items()
        if isinstance(value, torch.Tensor | list) and not name.startswith(_OF_IMAGES)
    )


@dataclass(frozen=True, eq=False)
class BatchParts:
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
    ) -> BatchParts:
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


def scores_padding(batch: object) -> bool:
    """Whether a loss over the labels or completion masks of a batch scores tokens from padding."""
    if not isinstance(batch, Mapping):  # tuples and the like: only their loss can interpret them
        return False
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    forwards = [[tensors.get(prefix + name) for name in _READ] for prefix in PREFIXES]
    labeled = [forward for forward in forwards if _has_token_labels(*forward)]
    on_host(*(x for forward in labeled for x in forward))  # one wait, also for the layouts of these forwards
    return any(_follow_padding(*forward) for forward in labeled)


def _has_token_labels(labels: Any, completion_mask: Any, *others: Any) -> bool:
    """Whether a forward has ids, a mask, and a label for each token: a classifier has one for each row or class."""
    tensors = [completion_mask if labels is None else labels, *others]
    return all(x is not None and x.shape == tensors[0].shape for x in tensors)


def _follow_padding(labels: Any, completion_mask: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> bool:
    labels, completion_mask, attention_mask = on_host(labels, completion_mask, attention_mask)
    return follow_padding(torch.where(completion_mask == 1, 0, -100) if labels is None else labels, attention_mask)


def scored_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """
    Mask of the tokens that a loss over labels or completions scores, `(B, L)`: never tokens of the first column.

    `None` if anything but such a loss reads the rows: then no column may be left out.
    """
    if [name for name in batch if name.endswith("input_ids")] != ["input_ids"]:
        return None
    labels, completion_mask = (x if isinstance(x := batch.get(n), torch.Tensor) else None for n in _READ[:2])
    scored = completion_mask if labels is None else labels != -100
    if scored is None or scored.shape != batch["input_ids"].shape:
        return None
    return scored.bool() & (torch.arange(scored.shape[1], device=scored.device) > 0)
