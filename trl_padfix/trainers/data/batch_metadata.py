"""
Layouts that travel with their batches.

Workers of the data loader build the layouts of a batch on the host, beside the batch itself: they are pinned and
uploaded with the batch, so no step of training waits for the device to build them. Where batches are made in the main
process, from completions that the model has generated, one copy to the host serves a whole generation. A batch
remembers the tensors that it was placed with: a tensor that is replaced or written to later gets a new layout, with
one wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import send_to_device

from ...core.call.batch_metadata import BatchFacts, Known, Pooled, Seen
from ...core.call.layout_of import LayoutKey, PrefixSharing
from ...core.errors import PaddingRemovalError
from ...core.layout.flat_maps import FlatIndexMaps
from ...core.layout.layout import Layout


__all__ = [
    "BATCH_LAYOUT",
    "BatchMetadata",
    "BatchWithMetadata",
    "LayoutCollator",
    "attach_metadata",
    "image_tensors",
    "pop_metadata",
    "scored",
    "with_labels",
]

BATCH_LAYOUT = "padfix_layout"
"""Where a batch has what is known of its forwards."""

PREFIXES = ("", "KL_")
"""What the names of a batch begin with: KTO has mismatched completions beside its own."""


@dataclass(frozen=True)
class LayoutCollator:
    """
    Adds to the batches of another collator what is known of their forwards.

    `packs_padded`: whether batches with a mask are packed; rows that arrive packed are kept apart either way.
    `pools_by`: the pad token by which a sequence classifier looks for the token that it scores.
    """

    collator: Callable[[list[Any]], Any]
    prefix_sharing: PrefixSharing
    packs_padded: bool = True
    pools_by: int | None = None

    def __call__(self, examples: list[Any]) -> Any:
        try:
            batch = self.collator(examples)
        except StopIteration as error:
            raise RuntimeError(
                f"{type(self.collator).__name__} raised StopIteration, which a data loader takes for the end of the "
                "data: the epoch would end here, and nobody would know. Look for a `next()` on what is empty."
            ) from error
        if not isinstance(batch, Mapping):  # processors make mappings that are no dictionaries
            return batch
        found = {prefix: self._facts(_of_forward(batch, prefix)) for prefix in PREFIXES}
        found = {prefix: facts for prefix, facts in found.items() if facts is not None}
        if not found:
            return batch
        return BatchWithMetadata({**batch, BATCH_LAYOUT: BatchMetadata(FlatIndexMaps.of(found), self.prefix_sharing)})

    def _facts(self, given: dict[str, Any]) -> BatchFacts | None:
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if ids is None or not all(t.device.type == "cpu" for t in given.values() if isinstance(t, torch.Tensor)):
            return None
        key = _key(given, self.prefix_sharing)
        if key is None or (mask is not None and not self.packs_padded):
            return None
        pooled = Pooled.of(ids, mask, self.pools_by) if mask is not None and self.pools_by is not None else None
        return BatchFacts(key.build(), scored(given), _images_repeat(given), pooled)


@dataclass(frozen=True, eq=False)
class BatchMetadata:
    """
    What is known of the forwards of a batch.

    `facts` are [`BatchFacts`] by the prefix of their names, in one block ([`FlatIndexMaps`]) on the way to a device. `seen`
    are the tensors of the batch as they were placed there; none before.
    """

    facts: Any
    prefix_sharing: PrefixSharing
    seen: dict[str, Seen] = field(default_factory=dict)

    def pin_memory(self, device: Any = None) -> BatchMetadata:
        """The same in page-locked memory; the data loader calls it."""
        return replace(self, facts=self.facts.pin_memory())

    def beside(self, batch: Mapping[str, Any], device: torch.device | str) -> BatchMetadata:
        """The same on a device, beside the tensors of the batch there."""
        seen = {name: Seen.of(x) for name, x in batch.items() if isinstance(x, torch.Tensor)}
        return replace(self, facts=self.facts.to(device), seen=seen)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layouts on their device, by the prefix of their names."""
        return {prefix: facts.layout for prefix, facts in self.facts.items()} if self.seen else {}

    def known(self, batch: Mapping[str, Any]) -> list[Known]:
        """What a step on `batch` knows: of tensors that somebody has replaced or written to, nothing."""
        return [known for prefix in self.facts for known in self._known(batch, prefix)] if self.seen else []

    def _known(self, batch: Mapping[str, Any], prefix: str) -> Iterator[Known]:
        facts: BatchFacts = self.facts[prefix]
        placed = _of_forward({name: seen.tensor for name, seen in self.seen.items()}, prefix)
        key = _key(placed, self.prefix_sharing)
        if key is None:
            return
        if not self.are_unwritten(batch, prefix + "labels", prefix + "completion_mask"):
            facts = replace(facts, scored=None)
        images = _names_of_images(placed)
        if not self.are_unwritten(batch, *images):
            facts = replace(facts, halves_equal=None)
        seen = {id(x.tensor): x for x in self.seen.values()}
        made_of = tuple(seen.get(id(x), Seen.of(None)) for x in key.tensors)
        yield Known(key, facts, made_of, tuple(self.seen[name] for name in images))

    def are_unwritten(self, batch: Mapping[str, Any], *names: str) -> bool:
        """Whether a batch has the tensors that were placed in it, as they were then; also where it has none."""
        return all(self.seen.get(name, Seen.of(None)).is_still(batch.get(name)) for name in names)


class BatchWithMetadata(dict):
    """A batch that remembers, when it is placed on a device, with which tensors."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> BatchWithMetadata:
        """The batch on a device, as accelerate places those that it is given."""
        return self.placed(lambda x: send_to_device(x, device, non_blocking=non_blocking), device)

    def placed(self, place: Callable[[Any], Any], device: torch.device | str) -> BatchWithMetadata:
        """The batch with its values placed by `place`."""
        moved = BatchWithMetadata({k: place(v) for k, v in self.items() if k != BATCH_LAYOUT})
        if BATCH_LAYOUT in self:
            moved[BATCH_LAYOUT] = self[BATCH_LAYOUT].beside(moved, device)
        return moved


def pop_metadata(batch: dict[str, Any]) -> tuple[dict[str, Any], BatchMetadata | None]:
    """A batch as a model takes it, and what is known of its forwards."""
    batch_metadata = batch.get(BATCH_LAYOUT)
    if batch_metadata is None:
        return batch, None
    return {k: v for k, v in batch.items() if k != BATCH_LAYOUT}, batch_metadata


def with_labels(batch: dict[str, Any], labels: torch.Tensor) -> dict[str, Any]:
    """A batch with other labels, of which the same places are scored: what is known of its forwards holds for them."""
    batch_metadata = batch.get(BATCH_LAYOUT)
    if batch_metadata is None or not batch_metadata.are_unwritten(batch, "labels"):
        return {**batch, "labels": labels}
    return {
        **batch,
        "labels": labels,
        BATCH_LAYOUT: replace(batch_metadata, seen=batch_metadata.seen | {"labels": Seen.of(labels)}),
    }


def attach_metadata(
    batches: list[dict[str, Any]], rows: list[tuple[torch.Tensor, torch.Tensor, int]], prefix_sharing: PrefixSharing
) -> list[dict[str, Any]]:
    """
    Batches on a device with the layouts of their `rows`: ids and mask of each, `(B, L)`, and how many of its last
    columns are scored. The host reads the device once.
    """
    both = [torch.stack([ids.to(torch.int64), mask.to(torch.int64)]) for ids, mask, _ in rows]
    on_host = torch.cat([x.flatten() for x in both]).cpu().split([x.numel() for x in both])
    found = []
    for batch, given, flat, (_, _, columns) in zip(batches, both, on_host, rows, strict=True):
        ids, mask = flat.view(given.shape)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : ids.shape[1] - columns] = -100
        text = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        batch_metadata = LayoutCollator(lambda rows, text=text: text, prefix_sharing)([])[BATCH_LAYOUT]
        found.append({**batch, BATCH_LAYOUT: batch_metadata.beside(batch, given.device)})
    return found


def _of_forward(batch: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """What a batch has for one of its forwards, by the names that the model has for it; images are for all."""
    if not prefix:
        return {k: v for k, v in batch.items() if not k.startswith(PREFIXES[1:])}
    own = {k.removeprefix(prefix): v for k, v in batch.items() if k.startswith(prefix)}
    return own | {k: batch[k] for k in _names_of_images(batch)}


def _key(given: Mapping[str, Any], prefix_sharing: PrefixSharing) -> LayoutKey | None:
    """What a forward on a batch makes its layout of; `None` if it has none, or will itself say what is wrong."""
    try:
        return LayoutKey.read(given, prefix_sharing=prefix_sharing)
    except (PaddingRemovalError, ValueError):
        return None


def image_tensors(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a batch has beside numbers for its rows and tokens."""
    return [v for v in batch.values() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1]


def _names_of_images(batch: Mapping[str, Any]) -> list[str]:
    """The images of a batch, and what it has beside them that is no number for each row or token: grids, masks."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor) and v.dim() > 1}
    rows = {tuple(v.shape) for k, v in tensors.items() if k.endswith("input_ids")}
    shapes = {k: {tuple(v.shape[:2]), tuple(v.shape[-2:])} for k, v in tensors.items()}
    return [k for k, v in tensors.items() if v.is_floating_point() or not shapes[k] & rows]


def _images_repeat(batch: Mapping[str, Any]) -> bool | None:
    if not image_tensors(batch):
        return None
    images = [batch[name] for name in _names_of_images(batch)]
    return all(len(v) % 2 == 0 and torch.equal(*v.chunk(2)) for v in images)


def scored(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Places, among those of `(B, L - 1)`, from which a label is predicted; `None` if the batch does not say."""
    labels, completion, mask = (batch.get(name) for name in ("labels", "completion_mask", "attention_mask"))
    if labels is not None:
        target = labels[:, 1:] != -100
    elif completion is not None:
        target = completion[:, 1:] == 1
    else:
        return None
    return (target if mask is None else target & mask[:, :-1].bool()).flatten().nonzero().squeeze(1)
