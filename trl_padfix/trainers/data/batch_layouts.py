"""
Layouts that travel with their batches.

Workers of the data loader build the layouts of a batch on the host, beside the batch itself: they are pinned and
uploaded with the batch, and a step of training waits for the device on their account nowhere. Where batches are made
in the main process, of completions that the model has generated, one copy to the host serves all of a generation. Code
that calls a model without such a layout still works: it is then built from the tensors that the model is given, with
one wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...core.call.layout_of import POOLED, REPEATED, Given, Known, PrefixSharing, layout_of_given, packed_kind
from ...core.call.pooled import Pooled
from ...core.handle import PaddingRemoval
from ...core.layout.flat_maps import FlatMaps
from ...core.layout.layout import Layout
from ..field_types import temporarily_set


__all__ = [
    "BATCH_LAYOUT",
    "LayoutCollator",
    "LayoutLoadingMixin",
    "images_in",
    "known_layouts",
    "read_by",
    "scored",
    "with_layout_of_rows",
    "without_layouts",
]


BATCH_LAYOUT = "padfix_layout"
"""Where the layout of a batch stands in it; behind the prefix of its names, if a batch has several forwards."""

_SAID_BY_IDS = {"input_ids", "attention_mask", "labels", "completion_mask", "position_ids", "seq_idx"}
"""Values for each token that tell no two tokens apart whose ids and positions are the same."""

PREFIXES = ("", "KL_")
"""What the names of a batch begin with: KTO has mismatched completions beside its own."""


@dataclass(frozen=True)
class LayoutCollator:
    """
    Adds to the batches of another collator the layouts of their forwards.

    Args:
        collator (`Callable`):
            Makes a batch of examples.
        prefix_sharing (`bool` or `"auto"`):
            Whether repeated prefixes are computed once.
        packs_padded (`bool`, *optional*, defaults to `True`):
            Whether batches with a mask are packed; rows that arrive packed are kept apart either way.
        pools_by (`int`, *optional*):
            The pad token by which a sequence classifier looks for the token that it scores.

    Raises:
        RuntimeError: If the collator raises `StopIteration`, which would end the epoch in silence.
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
        found = {prefix + BATCH_LAYOUT: self._layout(batch, prefix) for prefix in PREFIXES}
        found = {name: FlatMaps.of(layout) for name, layout in found.items() if layout is not None}
        return {**batch, **found} if found else batch

    def _layout(self, batch: Mapping[str, Any], prefix: str) -> Layout | None:
        read = read_by(batch, self.prefix_sharing, prefix)
        if read is None or not all(t is None or t.device.type == "cpu" for t in read[1]):
            return None
        mask = batch.get(f"{prefix}attention_mask")
        if mask is not None and not self.packs_padded:
            return None
        pooled = None
        if mask is not None and self.pools_by is not None:
            pooled = Pooled.of(batch[f"{prefix}input_ids"], mask, self.pools_by)
        found = {"scored": scored(batch, prefix), "images_repeat": _images_repeat(batch), "pooled": pooled}
        return replace(layout_of_given(*read), **found)


def without_layouts(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Layout]]:
    """A batch as a model takes it, and the layouts that came with it, on its device, by the prefix of their names."""
    names = {prefix + BATCH_LAYOUT: prefix for prefix in PREFIXES if prefix + BATCH_LAYOUT in batch}
    if not names:
        return batch, {}
    layouts = {}
    for name, prefix in names.items():
        carried = batch[name]  # what places batches on a device has placed it, too, if there is one
        ids = batch.get(f"{prefix}input_ids")
        if isinstance(carried, FlatMaps) and ids is not None:
            carried = carried.to(ids.device)
        layouts[prefix] = carried
    return {k: v for k, v in batch.items() if k not in names}, layouts


def known_layouts(batch: dict[str, Any], layouts: dict[str, Layout], prefix_sharing: PrefixSharing) -> Iterable[Known]:
    """The layouts that came with a batch, and the tensors that its forwards are known by."""
    for prefix, layout in layouts.items():
        read, ids = read_by(batch, prefix_sharing, prefix), batch.get(f"{prefix}input_ids")
        if read is None or ids is None or tuple(ids.shape) != layout.batch_shape:
            continue
        yield (*read, layout)
        if layout.pooled is not None:
            yield POOLED, (ids, batch.get(f"{prefix}attention_mask")), layout
        if layout.images_repeat:
            yield from ((REPEATED, (images,), layout) for images in _with_grids(batch))


def read_by(batch: Mapping[str, Any], prefix_sharing: PrefixSharing, prefix: str = "") -> tuple[str, Given] | None:
    """
    What a forward on a batch makes its layout of, as far as the batch itself says it; see [`layout_of_given`].

    With prefix sharing rows are also compared by what only the forward has (images become embeddings, tokens have
    types): there the batch says where its labels are, in a layout without sharing.

    Returns:
        `tuple[str, tuple]`, *optional*: kind and tensors; `None` if the batch has no such forward.
    """
    ids, mask = batch.get(f"{prefix}input_ids"), batch.get(f"{prefix}attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return None
    positions, bounds = batch.get(f"{prefix}position_ids"), batch.get(f"{prefix}cu_seq_lens_q")
    if mask is None:
        packed = isinstance(positions, torch.Tensor) and positions.dim() == 2
        shares = bool(prefix_sharing) and _is_text(batch, prefix, ids)
        return (packed_kind(shares), (ids, positions, bounds)) if packed else None
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or bounds is not None:
        return None
    if prefix_sharing and _is_text(batch, prefix, ids):
        return "prefix sharing", (ids, mask, positions)
    return "padding-free", (mask,)


def with_layout_of_rows(
    batches: list[dict[str, Any]], rows: list[tuple[torch.Tensor, torch.Tensor, int]], prefix_sharing: PrefixSharing
) -> list[dict[str, Any]]:
    """
    Batches with the layouts of their rows, for which the host reads the device once.

    Args:
        batches (`list[dict]`):
            Batches of one process that are on a device already.
        rows (`list[tuple[torch.Tensor, torch.Tensor, int]]`):
            Of each batch ids and mask, `(B, L)`, and how many of its last columns are scored.
        prefix_sharing (`bool` or `"auto"`):
            Whether repeated prefixes are computed once.
    """
    both = [torch.stack([ids.to(torch.int64), mask.to(torch.int64)]) for ids, mask, _ in rows]
    on_host = torch.cat([x.flatten() for x in both]).cpu().split([x.numel() for x in both])
    found = []
    for batch, given, flat, (_, _, columns) in zip(batches, both, on_host, rows, strict=True):
        ids, mask = flat.view(given.shape)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : ids.shape[1] - columns] = -100
        text = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        layout = layout_of_given(*(read_by(text, prefix_sharing) or ("padding-free", (mask,))))
        layout = replace(layout, scored=scored(text))
        found.append({**batch, BATCH_LAYOUT: FlatMaps.of(layout).to(given.device)})
    return found


def _is_text(batch: Mapping[str, Any], prefix: str, ids: torch.Tensor) -> bool:
    """Whether ids and positions say which tokens of a forward are equal."""
    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    own = [p for p in PREFIXES if p and p != prefix]
    of_forward = {k.removeprefix(prefix): v for k, v in tensors.items() if not any(k.startswith(p) for p in own)}
    others = {k for k, v in of_forward.items() if v.shape[:2] == ids.shape and k not in _SAID_BY_IDS}
    return not others and not images_in(batch)


def images_in(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a batch has beside numbers for its rows and tokens."""
    return [v for v in batch.values() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() > 1]


def _with_grids(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The images of a batch, and what it has beside them that is no number for each row or token: grids, masks."""
    ids = [batch.get(f"{prefix}input_ids") for prefix in PREFIXES]
    rows = {tuple(x.shape) for x in ids if isinstance(x, torch.Tensor)}
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 1]
    return [v for v in tensors if v.is_floating_point() or not {tuple(v.shape[:2]), tuple(v.shape[-2:])} & rows]


def _images_repeat(batch: Mapping[str, Any]) -> bool | None:
    if not images_in(batch):
        return None
    return all(len(v) % 2 == 0 and torch.equal(*v.chunk(2)) for v in _with_grids(batch))


def scored(batch: Mapping[str, Any], prefix: str = "") -> torch.Tensor | None:
    """Places, among those of `(B, L - 1)`, from which a label is predicted; `None` if the batch does not say."""
    names = (f"{prefix}{name}" for name in ("labels", "completion_mask", "attention_mask"))
    labels, completion, mask = (batch.get(name) for name in names)
    if labels is not None:
        target = labels[:, 1:] != -100
    elif completion is not None:
        target = completion[:, 1:] == 1
    else:
        return None
    return (target if mask is None else target & mask[:, :-1].bool()).flatten().nonzero().squeeze(1)


class LayoutLoadingMixin:
    """
    Layouts that the workers of data loaders make, for a TRL trainer; a part of `PaddingRemovalMixin`.

    A step, in training and evaluation, then waits for the device on their account nowhere. In a stream of which one
    process collates the batches of all (accelerate's default there, `dispatch_batches`) they cannot be brought: that
    process cuts batches, and sends them on tensor by tensor.
    """

    _handles: list[PaddingRemoval]

    _takes_layouts: bool | None = None
    """
    Whether batches come from their collator with the layouts of their forwards; `None` for those of training only, and
    where nobody has changed how a batch names ids and mask.
    """

    def get_train_dataloader(self) -> Any:
        with self._collating_layouts(self.train_dataset, is_training=True):
            return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        with self._collating_layouts(self.eval_dataset[found] if isinstance(found, str) else found):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        with self._collating_layouts(test_dataset):
            return super().get_test_dataloader(test_dataset)

    @contextlib.contextmanager
    def _collating_layouts(self, dataset: Any, is_training: bool = False) -> Iterator[None]:
        """Data loaders that are made within the block bring the layouts of their batches."""
        collator = self._layout_collator(dataset, is_training)
        if collator is self.data_collator:
            yield
            return
        # For one process accelerate would dispatch the batches of a stream to itself, tensor by tensor.
        config = self.accelerator.dataloader_config
        dispatch = False if config.dispatch_batches is None and _is_stream(dataset) else config.dispatch_batches
        with temporarily_set(self, "data_collator", collator), temporarily_set(config, "dispatch_batches", dispatch):
            yield

    def _layout_collator(self, dataset: Any, is_training: bool) -> Any:
        """The collator, and around it what adds layouts to its batches, if they can be brought."""
        dispatched = self.accelerator.dispatch_batches
        if dispatched is None:  # what one process collates for all is cut, and sent on tensor by tensor
            dispatched = _is_stream(dataset) and self.accelerator.num_processes > 1
        plain = is_training and type(self)._padded_batches is LayoutLoadingMixin._padded_batches
        takes = plain if self._takes_layouts is None else self._takes_layouts
        if not self._handles or dispatched or not takes:
            return self.data_collator
        return LayoutCollator(self.data_collator, self._shares_by_ids(), self._handles[0].packs_padded)

    def _shares_by_ids(self) -> PrefixSharing:
        """Whether prefixes are shared by what is in batches: what rows of images share only a forward knows."""
        handle = self._handles[0] if self._handles else None
        return False if handle is None or handle.multimodal is not None else handle.prefix_sharing

    def _known_layouts(self, inputs: dict[str, Any], layouts: dict[str, Layout]) -> Iterable[Known]:
        """The layouts that came with the batch of a step, and the tensors that its forwards are known by."""
        return known_layouts(inputs, layouts, self._shares_by_ids())

    def _padded_batches(self, inputs: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Ids and mask of each forward of the policy that a step on `inputs` takes."""
        return [{name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}]


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)
