"""
Metadata of a batch (layouts, label positions, doubled images), computed before its forwards and sent along with it.

Workers of the data loader compute the metadata on the host. It is uploaded with the batch, so no training step waits
for the device to build a layout. Online trainers make their batches in the main process; there one copy to
the host serves all micro-batches of a generation. A batch on a device records identity and version of its tensors: if
a tensor is replaced or modified later, the forward builds a new layout, which costs one synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers import BatchEncoding, BatchFeature

from ...core.call.batch_metadata import ForwardMetadata, KnownBatch, PooledTokens, TensorVersion
from ...core.call.labels import LabelsAfterPadding, find_labels_after_padding
from ...core.call.layout_of import LayoutInputs, PrefixSharing
from ...core.errors import PaddingRemovalError, UnpackableBatchError
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.layout import Layout
from .image_rows import count_images


__all__ = [
    "BatchMetadata",
    "BatchWithMetadata",
    "LayoutCollator",
    "attach_metadata",
    "batch_metadata_of",
    "image_tensors",
    "label_positions",
    "labels_after_padding",
    "pop_metadata",
    "rows_with_labels_of_padding",
    "scores_padding",
    "with_counted_labels",
    "with_labels",
    "without_first_labels",
]

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
        metadata = {prefix: self._forward_metadata(_inputs_of_forward(batch, prefix)) for prefix in PREFIXES}
        metadata = {prefix: of_forward for prefix, of_forward in metadata.items() if of_forward is not None}
        if not metadata:
            return batch
        # Flat, because a worker hands each tensor to the main process by a file descriptor: one instead of dozens.
        flat = FlatIndexMaps.of(metadata)
        return BatchWithMetadata(batch, BatchMetadata(flat, self.prefix_sharing, num_images=num_images or None))

    def _forward_metadata(self, inputs: dict[str, Any]) -> ForwardMetadata | None:
        if inputs.get("attention_mask") is not None and not self.packs_padded:
            return None
        return build_forward_metadata(inputs, self.prefix_sharing, self.pooling_pad_id, self.token_budget)


def build_forward_metadata(
    inputs: Mapping[str, Any],
    prefix_sharing: PrefixSharing,
    pooling_pad_id: int | None = None,
    token_budget: int | None = None,
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
        token_budget (`int`, *optional*):
            As in [`LayoutInputs.build`].

    Returns:
        [`ForwardMetadata`], or `None` without `input_ids`, with tensors on a device, and with nothing to pack, or
        nothing that can be packed.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or not all(x.device.type == "cpu" for x in inputs.values() if isinstance(x, torch.Tensor)):
        return None
    layout_inputs = _layout_inputs(inputs, prefix_sharing)
    if layout_inputs is None:
        return None
    try:
        layout = layout_inputs.build(token_budget)
    except UnpackableBatchError:  # the forward computes such a batch padded, or says what is wrong with it
        return None
    pools = mask is not None and pooling_pad_id is not None
    pooled = PooledTokens.of(ids, mask, pooling_pad_id) if pools else None
    return ForwardMetadata(
        layout, label_positions(inputs), _halves_are_equal(inputs), pooled, labels_after_padding(inputs)
    )


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """
    Metadata of the forwards of a batch.

    `flat` is the metadata on the host, as it is sent and uploaded: one block. `forward_metadata` is the same
    on the device of the batch, by the prefixes of the names ([`PREFIXES`]), and `versions` are the tensors of the
    batch there; both are empty before the batch is moved. `num_images` are the images of each example, if the
    examples have a column of images.
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
        of_forwards = self.forward_metadata.items()
        return [known for prefix, metadata in of_forwards for known in self._known_batch(batch, prefix, metadata)]

    def _known_batch(self, batch: Mapping[str, Any], prefix: str, metadata: ForwardMetadata) -> Iterator[KnownBatch]:
        original = _inputs_of_forward({name: version.tensor for name, version in self.versions.items()}, prefix)
        # Not of the tensors in `batch`: a forward compares its arguments with the versions of the original tensors.
        layout_inputs = _layout_inputs(original, self.prefix_sharing)
        if layout_inputs is None:
            return
        if not self.unmodified(batch, prefix + "labels", prefix + "completion_mask"):
            metadata = replace(metadata, label_positions=None, labels_after_padding=None)
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


def with_labels(batch: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    """
    The batch without labels of first tokens, or with other labels at the same positions.

    Its metadata stays valid.
    """
    batch_metadata = batch_metadata_of(batch)
    if batch_metadata is None or not batch_metadata.unmodified(batch, "labels"):
        return _updated(batch, labels=labels)
    versions = batch_metadata.versions | {"labels": TensorVersion.of(labels)}
    forward_metadata = batch_metadata.forward_metadata
    if (known := forward_metadata[""].labels_after_padding) is not None:
        metadata = replace(forward_metadata[""], labels_after_padding=known._replace(first_tokens=False))
        forward_metadata = {**forward_metadata, "": metadata}
    batch_metadata = replace(batch_metadata, versions=versions, forward_metadata=forward_metadata)
    return BatchWithMetadata({**batch, "labels": labels}, batch_metadata)


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

    Token `j + 1` is predicted at column `j`: labels `[[-100, 5, 6]]` without padding give `[0, 1]`. Labels of first
    tokens are left out, unless the batch has other labels that follow padding: it is computed padded then.
    """
    labels, mask = _token_labels(batch), batch.get("attention_mask")
    if labels is None:
        return None
    is_label = labels != -100
    if mask is not None:
        first, others = find_labels_after_padding(labels, mask)
        is_label = is_label if others.any() else is_label & ~first
    return is_label[:, 1:].flatten().nonzero().squeeze(1)


def labels_after_padding(batch: Mapping[str, Any]) -> LabelsAfterPadding | None:
    """Which labels of a batch follow padding; `None` without labels or mask."""
    labels, mask = _token_labels(batch), batch.get("attention_mask")
    if labels is None or mask is None:
        return None
    return LabelsAfterPadding.of(labels, mask)


def rows_with_labels_of_padding(batch: Mapping[str, Any]) -> list[int]:
    """Rows of a batch on the host with labels of padding: before the first real token, or after the last one."""
    labels, mask = _token_labels(batch), batch.get("attention_mask")
    if labels is None or mask is None:
        return []
    is_real = mask.bool()
    is_padding = (is_real.cumsum(1) == 0) | (is_real.flip(1).cumsum(1).flip(1) == 0)
    # Column 0 is never scored.
    return (is_padding & (labels != -100))[:, 1:].any(1).nonzero().flatten().tolist()


def without_first_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without labels of first tokens that follow padding, if its other labels follow real tokens."""
    has_labels = isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor)
    known = _known_labels_after_padding(batch) if has_labels else None
    if known is None or known.others or not known.first_tokens:
        return batch
    first, _ = find_labels_after_padding(batch["labels"], batch["attention_mask"])
    return with_labels(batch, batch["labels"].masked_fill(first, -100))


def with_counted_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as transformers counts its labels: as if padded right, if first tokens have labels."""
    if without_first_labels(batch) is batch:
        return batch
    labels, mask = batch["labels"], batch["attention_mask"]
    # Some versions count `labels[:, 1:]`, others all of them. Column 0 is where right padding has first tokens.
    columns = torch.arange(labels.shape[1], device=labels.device) + mask.argmax(1, keepdim=True)
    return _updated(batch, labels=labels.gather(1, columns % labels.shape[1]))


def _updated(batch: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy of a batch with other values; it stays a `BatchEncoding`, say, which has its keys as attributes."""
    batch = copy(batch)
    batch.update(values)
    return batch


def scores_padding(batch: Mapping[str, Any]) -> bool:
    """Whether a loss over the labels or completion masks of a batch scores tokens from padding."""
    if not isinstance(batch, Mapping):  # tuples and the like: only their loss knows what is in them
        return False
    known = (_known_labels_after_padding(batch, prefix) for prefix in PREFIXES)
    return any(any(after_padding) for after_padding in known if after_padding is not None)


def _known_labels_after_padding(batch: Mapping[str, Any], prefix: str = "") -> LabelsAfterPadding | None:
    """[`labels_after_padding`] from the metadata of a batch; without metadata the host waits for the device."""
    batch_metadata = batch_metadata_of(batch)
    names = (prefix + name for name in ("labels", "completion_mask", "input_ids", "attention_mask"))
    if batch_metadata is not None and batch_metadata.unmodified(batch, *names):
        if prefix in batch_metadata.forward_metadata:
            return batch_metadata.forward_metadata[prefix].labels_after_padding
    return labels_after_padding(_inputs_of_forward(batch, prefix))


def _token_labels(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Labels `(B, L)` of the tokens of a batch, from its labels or its completion mask; `None` if it has neither."""
    labels, completion, ids = (batch.get(name) for name in ("labels", "completion_mask", "input_ids"))
    if not isinstance(labels, torch.Tensor) and isinstance(completion, torch.Tensor):
        labels = torch.where(completion == 1, 0, -100)
    # A classifier has one label for each row, `(B,)`, or one for each class, `(B, K)`.
    has_tokens = isinstance(labels, torch.Tensor) and isinstance(ids, torch.Tensor) and labels.shape == ids.shape
    return labels if has_tokens else None
