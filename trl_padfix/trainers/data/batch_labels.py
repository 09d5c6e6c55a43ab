"""Labels of a batch: the positions that predict them, and those that only padding predicts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from ...core.call.batch_metadata import TensorVersion
from ...core.call.labels import LabelsAfterPadding, find_labels_after_padding
from .batch_metadata import PREFIXES, BatchWithMetadata, batch_metadata_of, inputs_of_forward


__all__ = [
    "label_positions",
    "labels_after_padding",
    "rows_with_labels_of_padding",
    "scores_padding",
    "with_counted_labels",
    "with_labels",
    "without_first_labels",
]


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
    return None if labels is None or mask is None else LabelsAfterPadding.of(labels, mask)


def rows_with_labels_of_padding(batch: Mapping[str, Any]) -> list[int]:
    """Rows of a batch on the host with labels of padding: before the first real token, or after the last one."""
    labels, mask = _token_labels(batch), batch.get("attention_mask")
    if labels is None or mask is None:
        return []
    is_real = mask.bool()
    is_padding = (is_real.cumsum(1) == 0) | (is_real.flip(1).cumsum(1).flip(1) == 0)
    # Column 0 is never scored.
    return (is_padding & (labels != -100))[:, 1:].any(1).nonzero().flatten().tolist()


def scores_padding(batch: Mapping[str, Any]) -> bool:
    """Whether a loss over the labels or completion masks of a batch scores tokens from padding."""
    if not isinstance(batch, Mapping):  # tuples and the like: only their loss knows what is in them
        return False
    known = (_known_labels_after_padding(batch, prefix) for prefix in PREFIXES)
    return any(any(after_padding) for after_padding in known if after_padding is not None)


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


def _updated(batch: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A copy of a batch with other values; it stays a `BatchEncoding`, say, which has its keys as attributes."""
    batch = copy(batch)
    batch.update(values)
    return batch


def _known_labels_after_padding(batch: Mapping[str, Any], prefix: str = "") -> LabelsAfterPadding | None:
    """[`labels_after_padding`] from the metadata of a batch; without metadata the host waits for the device."""
    batch_metadata = batch_metadata_of(batch)
    names = (prefix + name for name in ("labels", "completion_mask", "input_ids", "attention_mask"))
    metadata = batch_metadata and batch_metadata.forward_metadata.get(prefix)
    if batch_metadata is not None and metadata is not None and batch_metadata.unmodified(batch, *names):
        return metadata.labels_after_padding
    return labels_after_padding(inputs_of_forward(batch, prefix))


def _token_labels(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Labels `(B, L)` of the tokens of a batch, from its labels or its completion mask; `None` if it has neither."""
    labels, completion, ids = (batch.get(name) for name in ("labels", "completion_mask", "input_ids"))
    if not isinstance(labels, torch.Tensor) and isinstance(completion, torch.Tensor):
        labels = torch.where(completion == 1, 0, -100)
    # A classifier has one label for each row, `(B,)`, or one for each class, `(B, K)`.
    has_tokens = isinstance(labels, torch.Tensor) and isinstance(ids, torch.Tensor) and labels.shape == ids.shape
    return labels if has_tokens else None
