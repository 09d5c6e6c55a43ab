"""The part of a trainer by which the workers of its data loaders make the layouts, and its steps find them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...core.call.layout_of import Known, PrefixSharing, step_layouts
from ..field_types import temporarily_set
from ..parts import Part, Step
from ..task import Task
from .batch_layouts import LayoutCollator, known_layouts


__all__ = ["Layouts"]


class Layouts(Part):
    """
    Layouts that come with the batches of data loaders.

    A step, in training and evaluation, then waits for the device on their account nowhere. In a stream of which one
    process collates the batches of all (accelerate's default there, `dispatch_batches`) they cannot be brought: that
    process cuts batches, and sends them on tensor by tensor.
    """

    @contextlib.contextmanager
    def loading(self, dataset: Any, is_training: bool) -> Iterator[None]:
        if not self.brings(dataset, is_training):
            yield
            return
        handle = self.trainer.padding.handle
        pools_by = self.trainer.padding.task.pools_by(handle)
        collator = LayoutCollator(self.trainer.data_collator, self.shares_by_ids(), handle.packs_padded, pools_by)
        # For one process accelerate would dispatch the batches of a stream to itself, tensor by tensor.
        config = self.trainer.accelerator.dataloader_config
        dispatch = False if config.dispatch_batches is None and _is_stream(dataset) else config.dispatch_batches
        with (
            temporarily_set(self.trainer, "data_collator", collator),
            temporarily_set(config, "dispatch_batches", dispatch),
        ):
            yield

    def brings(self, dataset: Any, is_training: bool) -> bool:
        """Whether the batches of a dataset can bring their layouts."""
        accelerator, task = self.trainer.accelerator, self.trainer.padding.task
        dispatched = accelerator.dispatch_batches
        if dispatched is None:  # what one process collates for all is cut, and sent on tensor by tensor
            dispatched = _is_stream(dataset) and accelerator.num_processes > 1
        plain = is_training and type(task).padded_batches is Task.padded_batches
        takes = plain if task.takes_layouts is None else task.takes_layouts
        return bool(self.trainer.padding.handles and takes and not dispatched)

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """The forwards of policy and reference take the layouts of the batch."""
        self.trainer.padding.layouts = step.layouts
        with step_layouts(self.known(step)):
            yield

    def known(self, step: Step) -> Iterable[Known]:
        """The layouts that came with the batch of a step, and the tensors that its forwards are known by."""
        return known_layouts(step.inputs, step.layouts, self.shares_by_ids())

    def shares_by_ids(self) -> PrefixSharing:
        """Whether prefixes are shared by what is in batches: what rows of images share only a forward knows."""
        handle = self.trainer.padding.handle
        return False if handle is None or handle.multimodal is not None else handle.prefix_sharing


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)
