"""
Computes the metadata of batches on the host: in the collator, which runs in workers of the data loader.

Online trainers make their batches in the main process; there one copy to the host serves all micro-batches of a
generation ([`attach_metadata`]).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import BatchEncoding, BatchFeature

from ...core.call.batch_metadata import ForwardMetadata, PooledTokens
from ...core.call.layout_of import PrefixSharing
from ...core.errors import UnpackableBatchError
from ...core.layout.flat_maps import FlatIndexMaps
from .batch_labels import label_positions, labels_after_padding
from .batch_metadata import PREFIXES, BatchMetadata, BatchWithMetadata, inputs_of_forward, read_layout_inputs
from .image_rows import count_images, image_names, image_tensors


__all__ = ["LayoutCollator", "attach_metadata", "build_forward_metadata"]


@dataclass(frozen=True)
class LayoutCollator:
    """
    Adds [`BatchMetadata`] to the batches of another collator.

    `packs_padded`: whether batches with a mask are packed; packed batches are kept apart in either case.
    `pooling_pad_id`: the pad token by which a sequence classifier finds the token that it scores.
    `token_budget`: as in [`LayoutInputs.build`].
    """

    collator: Callable[[list[Any]], Any]
    prefix_sharing: PrefixSharing
    packs_padded: bool = True
    pooling_pad_id: int | None = None
    token_budget: int | None = None

    def __getattr__(self, name: str) -> Any:
        # Trainers read attributes of their collator (sentence-transformers the names of label columns).
        # Copies and pickles ask for `__getstate__` and the like, and have no `collator` yet while they are made.
        if name == "collator" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __call__(self, examples: list[Any]) -> Any:
        num_images = [count for count in map(count_images, examples) if count is not None]  # TRL's write to examples
        try:
            batch = self.collator(examples)
        except StopIteration as error:
            raise RuntimeError(
                f"{type(self.collator).__name__} raised StopIteration, which a data loader takes for the end of the "
                "data: the epoch would end here without a message. Look for a `next()` on an empty iterator."
            ) from error
        # `BatchEncoding` and `BatchFeature` are dictionaries with attributes, as batches with metadata are. Types of a
        # user's own stay what they are; their layouts are built in the forward.
        if type(batch) not in (dict, BatchEncoding, BatchFeature):
            return batch
        metadata = {}
        for prefix in PREFIXES:
            of_forward = build_forward_metadata(
                inputs_of_forward(batch, prefix),
                self.prefix_sharing,
                self.packs_padded,
                self.pooling_pad_id,
                self.token_budget,
            )
            if of_forward is not None:
                metadata[prefix] = of_forward
        if not metadata:
            return batch
        # Flat, because a worker hands each tensor to the main process by a file descriptor: one instead of dozens.
        flat = FlatIndexMaps.of(metadata)
        return BatchWithMetadata(batch, BatchMetadata(flat, self.prefix_sharing, num_images=num_images or None))


def build_forward_metadata(
    inputs: Mapping[str, Any],
    prefix_sharing: PrefixSharing,
    packs_padded: bool = True,
    pooling_pad_id: int | None = None,
    token_budget: int | None = None,
) -> ForwardMetadata | None:
    """
    Metadata of one forward, from its inputs on the host; the settings are those of [`LayoutCollator`].

    Returns:
        [`ForwardMetadata`], or `None` without `input_ids`, with tensors on a device, and with nothing to pack, or
        nothing that can be packed.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or not all(x.device.type == "cpu" for x in inputs.values() if isinstance(x, torch.Tensor)):
        return None
    layout_inputs = read_layout_inputs(inputs, prefix_sharing, packs_padded)
    if layout_inputs is None:
        return None
    try:
        layout = layout_inputs.build(token_budget)
    except UnpackableBatchError:  # the forward computes such a batch padded, or says what is wrong with it
        return None
    pools = mask is not None and pooling_pad_id is not None
    return ForwardMetadata(
        layout,
        label_positions=label_positions(inputs),
        halves_equal=_halves_are_equal(inputs),
        pooled=PooledTokens.of(ids, mask, pooling_pad_id) if pools else None,
        labels_after_padding=labels_after_padding(inputs),
    )


def attach_metadata(
    batches: list[dict[str, Any]], rows: list[tuple[torch.Tensor, torch.Tensor, int]], prefix_sharing: PrefixSharing
) -> list[dict[str, Any]]:
    """
    Attach metadata to batches that are on a device already, with one synchronisation for all of them.

    Args:
        batches (`list[dict]`):
            Batches on a device.
        rows (`list[tuple]`):
            For each batch its ids and mask, both `(B, L)`, and the number `C` of its completion columns: labels are
            the real tokens of the last `C` columns.
        prefix_sharing (`bool` or `"auto"`):
            As in [`LayoutCollator`].

    Returns:
        `list[dict]`, the batches with their metadata.
    """
    on_device = [torch.stack([ids.to(torch.int64), mask.to(torch.int64)]) for ids, mask, _ in rows]
    # Batches differ in shape, so they are flattened to be copied at once: each `.cpu()` is a synchronisation.
    on_host = torch.cat([x.flatten() for x in on_device]).cpu().split([x.numel() for x in on_device])
    result = []
    for batch, stacked, flat, (_, _, columns) in zip(batches, on_device, on_host, rows, strict=True):
        ids, mask = flat.view(stacked.shape)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : ids.shape[1] - columns] = -100
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        metadata = build_forward_metadata(inputs, prefix_sharing)
        if metadata is None:  # the mask is wrong; the forward raises the error
            result.append(batch)
            continue
        batch_metadata = BatchMetadata(FlatIndexMaps.of({"": metadata}), prefix_sharing)
        result.append(BatchWithMetadata(batch, batch_metadata.for_device(batch, stacked.device)))
    return result


def _halves_are_equal(batch: Mapping[str, Any]) -> bool | None:
    """Whether both halves of a batch (chosen and rejected) hold the same images; `None` without images."""
    if not image_tensors(batch):
        return None
    images = [batch[name] for name in image_names(batch)]
    return all(len(v) % 2 == 0 and torch.equal(*v.chunk(2)) for v in images)
