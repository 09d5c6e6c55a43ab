"""
Errors that one of several processes has, raised on all of them.

A process that stops alone leaves the others waiting in their next collective, until it times out. There is no
collective for errors. After the forwards of a batch processes sum their token counts, and with them they count the
processes that have an error (of the parity check, of a deferred check, a loss that is not finite). The sum is read
where the host does not wait for it.

Within TRL's loss each process computes collectives of TRL's: an error there stops one process only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .distributed import data_replicas, raise_on_all
from .metrics.token_counts import TokenCounts, summed_over_processes
from .parts import Part, Step


if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from .parts import PaddingFreeTrainer


__all__ = ["ProcessErrors"]


class ProcessErrors(Part):
    """Adds up the token counts of all processes, and raises the errors of one of them on all."""

    def __init__(self, trainer: PaddingFreeTrainer):
        super().__init__(trainer)
        self._error: Exception | None = None
        """An error of this process that the others do not have yet."""
        self._first: dict[str, int] = {}
        """The number of the first step of each mode."""

    def around_dataloader(
        self, dataset: Dataset | IterableDataset, is_training: bool
    ) -> contextlib.AbstractContextManager[None]:
        if is_training:
            self._error = None  # another exception may have ended the last training before its step was complete
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def around_step(self, step: Step) -> Iterator[None]:
        has_others = self.trainer.accelerator.num_processes > 1
        may_wait = self._may_wait(step) and has_others
        try:
            yield
        except Exception as error:
            if not (may_wait and step.is_computed):
                raise
            self._error = self._error or error
        counts = torch.zeros(8, dtype=torch.int64) if step.counts is None else step.counts
        if has_others:
            flag = torch.full_like(counts[:1], data_replicas(self.trainer) * (self._error is not None))
            sums = summed_over_processes(torch.cat([counts, flag]), self.trainer)
            counts, errors = sums.split([len(counts), 1])
            if may_wait and bool(errors):
                self._raise()
        self.trainer.padding.part(TokenCounts).add(step.mode, counts)

    def _may_wait(self, step: Step) -> bool:
        """Whether the host may read the sum in this step, which waits for the device; the same on all processes."""
        # The parity check of the first step waits anyway, `stop_on_nonfinite` in each step, and a CPU never.
        is_first = self._first.setdefault(step.mode, step.number) == step.number
        return is_first or self.settings.stop_on_nonfinite or self.trainer.accelerator.device.type == "cpu"

    def _raise(self) -> None:
        error, self._error = self._error, None
        raise_on_all(error)
