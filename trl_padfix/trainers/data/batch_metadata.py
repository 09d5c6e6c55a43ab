"""
Metadata of a batch (layouts, label positions, doubled images), computed before its forwards and sent along with it.

Workers of the data loader compute the metadata on the host. It is pinned and uploaded with the batch, so no training
step waits for the device to build a layout. Online trainers make their batches in the main process; there one copy to
the host serves all micro-batches of a generation. A batch on a device records identity and version of its tensors: if
a tensor is replaced or modified later, the forward builds a new layout, which costs one synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from ...core.call.batch_metadata import ForwardMetadata, KnownBatch, PooledTokens, TensorVersion
from ...core.call.layout_of import LayoutInputs, PrefixSharing
from ...core.errors import PaddingRemovalError
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.layout import Layout


__all__ = [
    "BATCH_LAYOUT",
    "BatchMetadata",
    "BatchWithMetadata",
    "LayoutCollator",
    "attach_metadata",
    "build_forward_metadata",
    "image_tensors",
    "label_positions",
    "pop_metadata",
    "with_labels",
]

BATCH_LAYOUT = "padfix_layout"
"""Key of a batch under which its [`BatchMetadata`] travels."""

PREFIXES = ("", "KL_")
"""Prefixes of the names in a batch, one for each forward of the policy: `KL_` are KTO's mismatched completions."""


@dataclass(frozen=True)
class LayoutCollator:
    """
    Adds [`BatchMetadata`] to the batches of another collator.

    `packs_padded`: whether batches with a mask are packed; packed batches are kept apart in either case.
    `pooling_pad_id`: the pad token by which a sequence classifier finds the token that it scores.
    """

    collator: Callable[[list[Any]], Any]
    prefix_sharing: PrefixSharing
    packs_padded: bool = True
    pooling_pad_id: int | None = None

    def __call__(self, examples: list[Any]) -> Any:
        try:
            batch = self.collator(examples)
        except StopIteration as error:
            raise RuntimeError(
                f"{type(self.collator).__name__} raised StopIteration, which a data loader takes for the end of the "
                "data: the epoch would end here without a message. Look for a `next()` on an empty iterator."
            ) from error
        if not isinstance(batch, Mapping):  # and not `dict`: processors return a `BatchFeature`, which is no dict
            return batch
        metadata = {prefix: self._forward_metadata(_inputs_of_forward(batch, prefix)) for prefix in PREFIXES}
        metadata = {prefix: of_forward for prefix, of_forward in metadata.items() if of_forward is not None}
        if not metadata:
            return batch
        # Flat, because a worker hands each tensor to the main process by a file descriptor: one instead of dozens.
        flat = FlatIndexMaps.of(metadata)
        return BatchWithMetadata({**batch, BATCH_LAYOUT: BatchMetadata(flat, self.prefix_sharing)})

    def _forward_metadata(self, inputs: dict[str, Any]) -> ForwardMetadata | None:
        if inputs.get("attention_mask") is not None and not self.packs_padded:
            return None
        return build_forward_metadata(inputs, self.prefix_sharing, self.pooling_pad_id)


def build_forward_metadata(
    inputs: Mapping[str, Any], prefix_sharing: PrefixSharing, pooling_pad_id: int | None = None
) -> ForwardMetadata | None:
    """
    Metadata of one forward.

    Args:
        inputs (`Mapping`):
            Tensors of a batch by the model's names: `input_ids` of shape `(B, L)`, and `attention_mask`,
            `position_ids`, `labels`, `completion_mask` and images if there are any.
        prefix_sharing (`bool` or `"auto"`):
            Whether the layout computes shared prefixes once.
        pooling_pad_id (`int`, *optional*):
            As in [`LayoutCollator`].

    Returns:
        [`ForwardMetadata`], or `None` without `input_ids`, with tensors on a device, and with nothing to pack.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or not all(x.device.type == "cpu" for x in inputs.values() if isinstance(x, torch.Tensor)):
        return None
    layout_inputs = _layout_inputs(inputs, prefix_sharing)
    if layout_inputs is None:
        return None
    pools = mask is not None and pooling_pad_id is not None
    pooled = PooledTokens.of(ids, mask, pooling_pad_id) if pools else None
    return ForwardMetadata(layout_inputs.build(), label_positions(inputs), _halves_are_equal(inputs), pooled)


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """
    Metadata of the forwards of a batch.

    `forward_metadata` maps the prefixes of the names ([`PREFIXES`]) to [`ForwardMetadata`]. Before it is on a device
    it is one block ([`FlatIndexMaps`]). `versions` are the tensors of the batch on that device; empty before.
    """

    forward_metadata: FlatIndexMaps | dict[str, ForwardMetadata]
    prefix_sharing: PrefixSharing
    versions: dict[str, TensorVersion] = field(default_factory=dict)

    def pin_memory(self, device: Any = None) -> BatchMetadata:
        """The same metadata in page-locked memory; the data loader calls it."""
        return replace(self, forward_metadata=self.forward_metadata.pin_memory())

    def for_device(self, batch: Mapping[str, Any], device: torch.device | str) -> BatchMetadata:
        """The metadata on a device, with the versions of the tensors that `batch` has there."""
        versions = {name: TensorVersion.of(x) for name, x in batch.items() if isinstance(x, torch.Tensor)}
        return replace(self, forward_metadata=self.forward_metadata.to(device), versions=versions)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts on their device, by prefix; empty before they are there."""
        if isinstance(self.forward_metadata, FlatIndexMaps):
            return {}
        return {prefix: metadata.layout for prefix, metadata in self.forward_metadata.items()}

    def known_batches(self, batch: Mapping[str, Any]) -> list[KnownBatch]:
        """The metadata still valid for `batch`: entries of replaced or modified tensors are left out."""
        if isinstance(self.forward_metadata, FlatIndexMaps):
            return []
        of_forwards = self.forward_metadata.items()
        return [known for prefix, metadata in of_forwards for known in self._known_batch(batch, prefix, metadata)]

    def _known_batch(self, batch: Mapping[str, Any], prefix: str, metadata: ForwardMetadata) -> Iterator[KnownBatch]:
        original = _inputs_of_forward({name: version.tensor for name, version in self.versions.items()}, prefix)
        # Not of the tensors in `batch`: a forward compares its arguments with the versions of the original tensors.
        layout_inputs = _layout_inputs(original, self.prefix_sharing)
        if layout_inputs is None:
            return
        if not self.unmodified(batch, prefix + "labels", prefix + "completion_mask"):
            metadata = replace(metadata, label_positions=None)
        image_names = _image_names(original)
        if not self.unmodified(batch, *image_names):
            metadata = replace(metadata, halves_equal=None)
        # By identity: the inputs are the very tensors of the batch, or made by `LayoutInputs` (a mask of ones).
        by_id = {id(version.tensor): version for version in self.versions.values()}
        versions = tuple(by_id.get(id(x), TensorVersion.of(None)) for x in layout_inputs.tensors)
        yield KnownBatch(layout_inputs, metadata, versions, tuple(self.versions[name] for name in image_names))

    def unmodified(self, batch: Mapping[str, Any], *names: str) -> bool:
        """Whether the tensors of these names are still those moved to the device, unwritten; or missing in both."""
        absent = TensorVersion.of(None)
        return all(self.versions.get(name, absent).matches(batch.get(name)) for name in names)


class BatchWithMetadata(dict):
    """A dict that records identity and version of its tensors in `.to(device)`, to detect stale layouts."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BatchWithMetadata:
        """The batch on a device. accelerate calls this method instead of moving the values of a dict itself."""
        return self.moved(lambda x: send_to_device(x, device, non_blocking=non_blocking), device)

    def moved(self, move: Callable[[Any], Any], device: torch.device | str) -> BatchWithMetadata:
        """The batch with each value moved to `device` by `move`."""
        batch = BatchWithMetadata({k: move(v) for k, v in self.items() if k != BATCH_LAYOUT})
        if BATCH_LAYOUT in self:
            batch[BATCH_LAYOUT] = self[BATCH_LAYOUT].for_device(batch, device)
        return batch


def pop_metadata(batch: dict[str, Any]) -> tuple[dict[str, Any], BatchMetadata | None]:
    """The batch without its metadata, as a model takes it, and the metadata. The argument itself is not changed."""
    batch_metadata = batch.get(BATCH_LAYOUT)
    if batch_metadata is None:
        return batch, None
    return {k: v for k, v in batch.items() if k != BATCH_LAYOUT}, batch_metadata


def with_labels(batch: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    """The batch with other labels at the same label positions; its metadata stays valid for them."""
    batch_metadata = batch.get(BATCH_LAYOUT)
    if batch_metadata is None or not batch_metadata.unmodified(batch, "labels"):
        return {**batch, "labels": labels}
    versions = batch_metadata.versions | {"labels": TensorVersion.of(labels)}
    return {**batch, "labels": labels, BATCH_LAYOUT: replace(batch_metadata, versions=versions)}


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
        result.append({**batch, BATCH_LAYOUT: batch_metadata.for_device(batch, stacked.device)})
    return result


def _inputs_of_forward(batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Values of a batch for the forward of `prefix`, by the model's names; all forwards share the images."""
    if not prefix:
        return {k: v for k, v in batch.items() if not k.startswith(PREFIXES[1:])}
    inputs = {k.removeprefix(prefix): v for k, v in batch.items() if k.startswith(prefix)}
    return inputs | {k: batch[k] for k in _image_names(batch)}


def _layout_inputs(inputs: Mapping[str, Any], prefix_sharing: PrefixSharing) -> LayoutInputs | None:
    """The inputs of the layout of a forward; `None` without a layout, and where the forward will raise an error."""
    try:
        layout_inputs = LayoutInputs.read(inputs, prefix_sharing=prefix_sharing)
    except (PaddingRemovalError, ValueError):
        return None
    # Keys that are made of several tensors are made anew in the forward, which would not recognise those of here.
    if layout_inputs is None or (layout_inputs.shares and layout_inputs.positions is not inputs.get("position_ids")):
        return None
    return layout_inputs if layout_inputs.shares or prefix_sharing is not True else None


def image_tensors(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Pixel values of a batch: its floating-point tensors with more than one dimension."""
    return [v for v in batch.values() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1]


def _image_names(batch: Mapping[str, Any]) -> list[str]:
    """Names of pixel values, grids and pixel masks: tensors whose shape is not that of ids, `(B, L)`."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 1}
    shapes_of_ids = {tuple(v.shape) for k, v in tensors.items() if k.endswith("input_ids")}
    # The first two dimensions and the last two: values for each token may be `(B, L, ...)` or `(..., B, L)`.
    shapes = {k: {tuple(v.shape[:2]), tuple(v.shape[-2:])} for k, v in tensors.items()}
    return [k for k, v in tensors.items() if v.is_floating_point() or not shapes[k] & shapes_of_ids]


def _halves_are_equal(batch: Mapping[str, Any]) -> bool | None:
    """Whether both halves of a batch (chosen and rejected) hold the same images; `None` without images."""
    if not image_tensors(batch):
        return None
    images = [batch[name] for name in _image_names(batch)]
    return all(len(v) % 2 == 0 and torch.equal(*v.chunk(2)) for v in images)


def label_positions(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """
    Flat positions in `(B, L - 1)` from which a label is predicted, `(n,)`; `None` without labels or completion mask.

    Token `j + 1` is predicted at column `j`: labels `[[-100, 5, 6]]` without padding give `[0, 1]`.
    """
    labels, completion, mask = (batch.get(name) for name in ("labels", "completion_mask", "attention_mask"))
    if labels is not None:
        is_label = labels[:, 1:] != -100
    elif completion is not None:
        is_label = completion[:, 1:] == 1
    else:
        return None
    # A label behind padding is scored from a masked position; packed rows have no such position.
    return (is_label if mask is None else is_label & mask[:, :-1].bool()).flatten().nonzero().squeeze(1)
