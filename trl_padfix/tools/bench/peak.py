"""The arithmetic that a device reaches: what the share of it that a step uses is measured against."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .settings import ImpossibleFigureError, VariantResult


__all__ = ["Peak", "wait"]

SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
"""Sides of the matrices that are multiplied: the best of them counts."""


class Peak:
    """
    The best matrix product seen so far on a device, measured again and again beside the steps: a device that speeds up
    or slows down does so for both, so a step that seems to do more than is possible was counted wrong.

    The best of `dtypes` counts: bfloat16 is slower than float32 on CPUs that have no instructions for it. `given` are
    TFLOP/s to be used instead.
    """

    def __init__(self, device: str, dtypes: Sequence[torch.dtype], given: float | None = None):
        self.device, self.dtypes, self.given = device, dtypes, given
        self.measured = 0.0
        self._fastest: tuple[int, torch.dtype] | None = None

    def measure(self, times: int = 1) -> None:
        """Multiply matrices, the first time of every size and precision, later those that were fastest."""
        if self.given is not None:
            return
        every = [(size, dtype) for dtype in self.dtypes for size in SIZES[self.device]]
        for size, dtype in every if self._fastest is None else [self._fastest]:
            factor = torch.randn(size, size, device=self.device, dtype=dtype)
            for _ in range(times):
                wait(self.device)
                start = time.perf_counter()
                torch.mm(factor, factor)
                wait(self.device)
                tflops = 2 * size**3 / (time.perf_counter() - start) / 1e12
                if tflops > self.measured:
                    self.measured, self._fastest = tflops, (size, dtype)

    @property
    def tflops(self) -> float:
        """TFLOP/s, as given or measured."""
        return self.measured if self.given is None else self.given

    def share(self, flops: float, seconds: float) -> float:
        """The share of the peak that `flops` in `seconds` are."""
        return flops / seconds / (self.tflops * 1e12)

    def check(self, results: list[VariantResult]) -> None:
        """Raise an [`ImpossibleFigureError`] if a variant seems to have done more than all of the peak."""
        for name, share in ((result.name, result.mfu) for result in results):
            if not 0 <= share <= 1:
                source = "was given (`--peak-tflops`)" if self.given else "a matrix product reached beside it"
                raise ImpossibleFigureError(
                    f"A step of {name} would do {share * self.tflops:.4g} TFLOP/s, which is {share:.0%} of the "
                    f"{self.tflops:.4g} that {source}. No step does more than the device can: the peak is too low, or "
                    "something else ran on the machine while it was measured. Give the peak of the device, or run "
                    "again on an idle machine.",
                    results,
                )


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
