"""Data loaders whose batches bring the layouts of their forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..core.batches import Known, PrefixSharing
from ..core.handle import PaddingRemoval
from ..core.layout import Layout
from .batch_layouts import LayoutCollator, known_layouts
from .fields import field_set


__all__ = ["LayoutLoadingMixin"]


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
        with field_set(self, "data_collator", collator), field_set(config, "dispatch_batches", dispatch):
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
