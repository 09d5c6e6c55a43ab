"""The part of a trainer by which the workers of its data loaders make the layouts, and its steps find them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ...core.call.batch_metadata import DeferredCheck, run_deferred_checks, share_layouts
from ...core.call.layout_of import PrefixSharing
from ..field_types import temporarily_set
from ..parts import Part, Step
from .batch_metadata import LayoutCollator


__all__ = ["PrecomputedLayouts"]

MAX_PENDING_STEPS = 64
"""Steps of which nobody has looked yet whether what they relied on holds, at most."""


class PrecomputedLayouts(Part):
    """
    Layouts that come with the batches of data loaders.

    Building them then makes no step wait for the device, in training and evaluation. They cannot be brought in a
    stream of which one process collates the batches of all processes (`dispatch_batches`, accelerate's default
    there): that process cuts batches, and sends them on tensor by tensor.
    """

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._unread: list[tuple[list[DeferredCheck], str]] = []

    @contextlib.contextmanager
    def loading(self, dataset: Any, is_training: bool) -> Iterator[None]:
        if not self.can_precompute(dataset, is_training):
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

    def can_precompute(self, dataset: Any, is_training: bool) -> bool:
        """Whether the batches of a dataset can bring their layouts."""
        accelerator, padding = self.trainer.accelerator, self.trainer.padding
        dispatched = accelerator.dispatch_batches
        if dispatched is None:  # what one process collates for all is cut, and sent on tensor by tensor
            dispatched = _is_stream(dataset) and accelerator.num_processes > 1
        return bool(padding.handles and padding.task.precomputes_layouts(is_training) and not dispatched)

    @contextlib.contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """
        The forwards of policy and reference take the layouts of the batch. That somebody wrote to it unseen is found
        at once on a CPU, and elsewhere before something is logged or saved.
        """
        self.trainer.padding.layouts = step.batch_metadata.layouts if step.batch_metadata is not None else {}
        deferred_checks: list[DeferredCheck] = []
        with share_layouts(step.known, deferred_checks):
            yield
        if not deferred_checks:
            return
        self._unread.append((deferred_checks, f" in step {step.number} of {step.mode}"))
        if len(self._unread) >= MAX_PENDING_STEPS or all(
            doubt.wrong.device.type == "cpu" for doubt in deferred_checks
        ):
            self.run_deferred_checks()

    def run_deferred_checks(self) -> None:
        """Read what steps have relied on, waiting for the device; an error if it did not hold."""
        steps, self._unread = self._unread, []
        for deferred_checks, of in steps:
            run_deferred_checks(deferred_checks, of)

    def log(self, logs: dict[str, float], mode: str) -> None:
        self.run_deferred_checks()

    def shares_by_ids(self) -> PrefixSharing:
        """Whether prefixes are shared by what is in batches: what rows of images share only a forward knows."""
        handle = self.trainer.padding.handle
        return False if handle is None or handle.multimodal is not None else handle.prefix_sharing


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)
