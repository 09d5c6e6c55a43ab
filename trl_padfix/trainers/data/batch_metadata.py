"""
Metadata of a batch (layouts, label positions, doubled images), computed before its forwards and sent along with it.

Workers of the data loader compute the metadata on the host ([`LayoutCollator`]). It is uploaded with the batch, so no
training step waits for the device to build a layout. A batch on a device records identity and version of its tensors:
if a tensor is replaced or modified later, the forward builds a new layout, which costs one synchronisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from ...core.call.batch_metadata import ForwardMetadata, KnownBatch, TensorVersion
from ...core.call.layout_of import LayoutInputs, PrefixSharing
from ...core.errors import PaddingRemovalError
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.layout import Layout
from .image_rows import image_names


__all__ = [
    "BatchMetadata",
    "BatchWithMetadata",
    "batch_metadata_of",
    "inputs_of_forward",
    "pop_metadata",
    "read_layout_inputs",
]

PREFIXES = ("", "KL_")
"""Prefixes of the names in a batch, one for each forward of the policy: `KL_` are KTO's mismatched completions."""


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """
    Metadata of the forwards of a batch.

    `flat` is the metadata on the host, one block that is sent and uploaded. `forward_metadata` is the same on the
    device of the batch, by the prefixes of the names ([`PREFIXES`]); `versions` are the tensors of the batch there.
    Both are empty before the batch is moved. `num_images` are the images of each example, if the examples have a
    column of images.
    """

    flat: FlatIndexMaps[dict[str, ForwardMetadata]]
    prefix_sharing: PrefixSharing
    forward_metadata: dict[str, ForwardMetadata] = field(default_factory=dict)
    versions: dict[str, TensorVersion] = field(default_factory=dict)
    num_images: list[int] | None = None

    def for_device(self, batch: Mapping[str, Any], device: torch.device | str) -> BatchMetadata:
        """The metadata on a device, with the versions of the tensors that `batch` has there."""
        versions = {name: TensorVersion.of(x) for name, x in batch.items() if isinstance(x, torch.Tensor)}
        return replace(self, forward_metadata=self.flat.to(device), versions=versions)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts on their device, by prefix; empty before they are there."""
        return {prefix: metadata.layout for prefix, metadata in self.forward_metadata.items()}

    def known_batches(self, batch: Mapping[str, Any]) -> list[KnownBatch]:
        """The metadata still valid for `batch`: entries of replaced or modified tensors are left out."""
        known = [self._known_batch(batch, prefix, metadata) for prefix, metadata in self.forward_metadata.items()]
        return [known_batch for known_batch in known if known_batch is not None]

    def _known_batch(self, batch: Mapping[str, Any], prefix: str, metadata: ForwardMetadata) -> KnownBatch | None:
        original = inputs_of_forward({name: version.tensor for name, version in self.versions.items()}, prefix)
        # Not of the tensors in `batch`: a forward compares its arguments with the versions of the original tensors.
        layout_inputs = read_layout_inputs(original, self.prefix_sharing)
        if layout_inputs is None:
            return None
        if not self.unmodified(batch, prefix + "labels", prefix + "completion_mask"):
            metadata = replace(metadata, label_positions=None, labels_after_padding=None)
        images = image_names(original)
        if not self.unmodified(batch, *images):
            metadata = replace(metadata, halves_equal=None)
        # By identity: the inputs are the very tensors of the batch, or made by `LayoutInputs` (a mask of ones).
        by_id = {id(version.tensor): version for version in self.versions.values()}
        versions = tuple(by_id.get(id(x), TensorVersion.of(None)) for x in layout_inputs.tensors)
        return KnownBatch(layout_inputs, metadata, versions, tuple(self.versions[name] for name in images))

    def unmodified(self, batch: Mapping[str, Any], *names: str) -> bool:
        """Whether the tensors of these names are still those moved to the device, unwritten; or missing in both."""
        absent = TensorVersion.of(None)
        return all(self.versions.get(name, absent).matches(batch.get(name)) for name in names)


class BatchWithMetadata(dict):
    """
    A batch with its [`BatchMetadata`], which is an attribute: user code finds nothing but tensors in the dictionary.

    The attribute survives copies, pickling by workers, and `.to(device)`, which records identity and version of the
    tensors to detect stale layouts. A new dictionary made of the values (`{**batch}`) has no metadata. Keys are also
    attributes (`batch.input_ids`), as in a `BatchEncoding`.
    """

    def __init__(self, batch: Mapping[str, Any] | Iterable[Any] = (), metadata: BatchMetadata | None = None):
        super().__init__(batch)
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        # Called for names that are no attribute. Underscores: `copy` and `pickle` ask before there is any.
        if name.startswith("_") or name not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[name]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BatchWithMetadata:
        """The batch on a device. accelerate calls this method instead of moving the values of a dict itself."""
        batch = {k: send_to_device(v, device, non_blocking=non_blocking) for k, v in self.items()}
        return BatchWithMetadata(batch, self._metadata and self._metadata.for_device(batch, device))


def batch_metadata_of(batch: Any) -> BatchMetadata | None:
    """The metadata that travels with a batch."""
    return batch._metadata if isinstance(batch, BatchWithMetadata) else None


def pop_metadata(batch: Any) -> tuple[Any, BatchMetadata | None]:
    """The batch without its metadata, as a model takes it, and the metadata. The argument itself is not changed."""
    batch_metadata = batch_metadata_of(batch)
    return (batch if batch_metadata is None else BatchWithMetadata(batch)), batch_metadata


def inputs_of_forward(batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Values of a batch for the forward of `prefix`, by the model's names; all forwards share the images."""
    if not prefix:
        return {k: v for k, v in batch.items() if not k.startswith(PREFIXES[1:])}
    inputs = {k.removeprefix(prefix): v for k, v in batch.items() if k.startswith(prefix)}
    return inputs | {k: batch[k] for k in image_names(batch)}


def read_layout_inputs(
    inputs: Mapping[str, Any], prefix_sharing: PrefixSharing, packs_padded: bool = True
) -> LayoutInputs | None:
    """The inputs of the layout of a forward; `None` without a layout, and where the forward will raise an error."""
    try:
        layout_inputs = LayoutInputs.read(inputs, prefix_sharing=prefix_sharing, packs_padded=packs_padded)
    except (PaddingRemovalError, ValueError):
        return None
    # The forward builds keys of several tensors again, and would not recognise the ones from here.
    if layout_inputs is None or (layout_inputs.shares and layout_inputs.positions is not inputs.get("position_ids")):
        return None
    return layout_inputs if layout_inputs.shares or prefix_sharing is not True else None
