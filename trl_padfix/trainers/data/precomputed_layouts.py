"""The part of a trainer that computes layouts in the workers of its data loaders and shares them in its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ...core.call.batch_metadata import DeferredCheck, run_deferred_checks, share_layouts
from ...core.call.layout_of import PrefixSharing
from ..parts import Part, Step
from ..temporary_attributes import temporarily_set
from .layout_collator import LayoutCollator


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ..parts import PaddingFreeTrainer


__all__ = ["PrecomputedLayouts"]

MAX_PENDING_STEPS = 64
"""Maximum number of steps with pending deferred checks, each of which keeps a tensor on the device."""


class PrecomputedLayouts(Part):
    """
    Adds [`BatchMetadata`] to the batches of data loaders, and gives it to the forwards of each step.

    No step of training or evaluation then waits for the device to build a layout. With `dispatch_batches`
    (accelerate's default for streams) one process collates the batches of all processes, cuts them and sends each
    tensor by itself; metadata cannot be sent that way, so forwards build their layouts.
    """

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._pending: list[tuple[list[DeferredCheck], str]] = []

    @contextlib.contextmanager
    def around_dataloader(self, dataset: Dataset | IterableDataset, is_training: bool) -> Iterator[None]:
        if not self.can_precompute(dataset, is_training):
            yield
            return
        handle = self.trainer.padding.handle
        pad_id = self.trainer.padding.task.pooling_pad_id(handle)
        collator = LayoutCollator(
            self.trainer.data_collator, self.shares_by_ids(), handle.packs_padded, pad_id, handle.token_budget
        )
        # With one process accelerate would dispatch the batches of a stream to that process itself, tensor by tensor.
        config = self.trainer.accelerator.dataloader_config
        dispatch = False if config.dispatch_batches is None and _is_stream(dataset) else config.dispatch_batches
        with (
            temporarily_set(self.trainer, "data_collator", collator),
            temporarily_set(config, "dispatch_batches", dispatch),
        ):
            yield

    def can_precompute(self, dataset: Dataset | IterableDataset, is_training: bool) -> bool:
        """Whether metadata can travel with the batches of a dataset."""
        accelerator, padding = self.trainer.accelerator, self.trainer.padding
        dispatched = accelerator.dispatch_batches
        if dispatched is None:  # accelerate's default: streams are dispatched
            dispatched = _is_stream(dataset) and accelerator.num_processes > 1
        return bool(padding.handles and padding.task.precomputes_layouts(is_training) and not dispatched)

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        """
        Share the layouts of the batch with the forwards of policy and reference.

        A write to the batch that leaves no trace is reported at once on a CPU, and elsewhere before the next log or
        checkpoint.
        """
        self.trainer.padding.layouts = step.batch_metadata.layouts if step.batch_metadata is not None else {}
        deferred_checks: list[DeferredCheck] = []
        with share_layouts(step.known, deferred_checks):
            yield
        if not deferred_checks:
            return
        self._pending.append((deferred_checks, f" in step {step.number} of {step.mode}"))
        # Reading a tensor on an accelerator waits for it; on a CPU it costs nothing.
        if len(self._pending) >= MAX_PENDING_STEPS or all(
            check.violations.device.type == "cpu" for check in deferred_checks
        ):
            self.run_deferred_checks()

    def run_deferred_checks(self) -> None:
        """
        Run the deferred checks of past steps, which waits for the device.

        Raises:
            PaddingRemovalError: If a check fails: numbers of that step are wrong.
        """
        pending, self._pending = self._pending, []
        for deferred_checks, which_step in pending:
            run_deferred_checks(deferred_checks, which_step)

    def log(self, logs: dict[str, float], mode: str) -> None:
        self.run_deferred_checks()

    def shares_by_ids(self) -> PrefixSharing:
        """`prefix_sharing` for layouts built from ids; `False` with images, which only a forward can compare."""
        handle = self.trainer.padding.handle
        return False if handle is None or handle.multimodal is not None else handle.prefix_sharing


def _is_stream(dataset: Dataset | IterableDataset) -> bool:
    return isinstance(dataset, torch.utils.data.IterableDataset)
