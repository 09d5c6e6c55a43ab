"""
Layouts that travel with their batches.

Workers of the data loader build the layout of a batch on the host, beside the batch itself: it is pinned and uploaded
with the batch, and a step of training waits for the device on its account nowhere. Code that calls a model without
such a layout still works: the layout is then built from the tensors that the model is given, with one wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.batches import PrefixSharing, layout_of_batch, step_layouts
from ..core.index_maps import FlatMaps
from ..core.layout import Layout


__all__ = ["LayoutCollator", "layouts_of_step", "without_layout"]

BATCH_LAYOUT = "padfix_layout"
"""Where the layout of a batch stands in it."""


@dataclass(frozen=True)
class LayoutCollator:
    """
    Adds its layout to the batches of another collator.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        prefix_sharing (`bool` or `"auto"`):
            Whether repeated prefixes are computed once.
    """

    collator: Callable[[list[Any]], Any]
    prefix_sharing: PrefixSharing

    def __call__(self, examples: list[Any]) -> Any:
        batch = self.collator(examples)
        layout = _layout(batch, self.prefix_sharing) if isinstance(batch, dict) else None
        return batch if layout is None else {**batch, BATCH_LAYOUT: FlatMaps.of(layout)}


def without_layout(batch: dict[str, Any]) -> tuple[dict[str, Any], Layout | None]:
    """A batch as a model takes it, and its layout on the batch's device, if one came with it."""
    if BATCH_LAYOUT not in batch:
        return batch, None
    carried = batch[BATCH_LAYOUT]  # what places batches on a device has placed it, too, if there is one
    carried = carried.to(batch["input_ids"].device) if isinstance(carried, FlatMaps) else carried
    return {k: v for k, v in batch.items() if k != BATCH_LAYOUT}, carried


def layouts_of_step(
    batch: dict[str, Any], layout: Layout | None, prefix_sharing: PrefixSharing
) -> AbstractContextManager[None]:
    """The scope of a step on `batch`, in which its forwards find `layout`."""
    if layout is None:
        return step_layouts()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    given = ("prefix sharing", (ids, mask, None)) if prefix_sharing else ("padding-free", (mask,))
    return step_layouts([(*given, layout)])


def _layout(batch: dict[str, Any], prefix_sharing: PrefixSharing) -> Layout | None:
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not all(isinstance(x, torch.Tensor) and x.dim() == 2 and x.device.type == "cpu" for x in (ids, mask)):
        return None
    # Positions, images and the types of their tokens are part of what may be shared, and are left to the forward.
    others = [k for k, v in batch.items() if isinstance(v, torch.Tensor) and v.shape[:2] == ids.shape]
    others += [k for k, v in batch.items() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1]
    if ids.shape != mask.shape or set(others) - {"input_ids", "attention_mask", "labels", "completion_mask"}:
        return None
    return replace(layout_of_batch(ids, mask, prefix_sharing=prefix_sharing), scored=_scored(batch, mask))


def _scored(batch: dict[str, Any], mask: torch.Tensor) -> torch.Tensor | None:
    """Places, among those of `(B, L - 1)`, from which a label is predicted; `None` if the batch does not say."""
    labels, completion = batch.get("labels"), batch.get("completion_mask")
    if labels is None and completion is None:
        return None
    target = labels != -100 if labels is not None else completion == 1
    return (target[:, 1:] & mask[:, :-1].bool()).flatten().nonzero().squeeze(1)
