"""Peak arithmetic of a device: the fastest matrix product, against which the share of a step (MFU) is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .settings import VariantResult


__all__ = ["Peak", "wait"]

SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
"""Sides of the square matrices that are multiplied; the fastest product counts."""


class Peak:
    """
    TFLOP/s of the fastest matrix product on a device.

    It is measured again between the steps. If the clock of the device changes, it changes for products and steps, so a
    step that seems faster than the peak was measured or counted wrong.

    Args:
        device (`str`):
            `"cpu"` or `"cuda"`.
        dtypes (`Sequence[torch.dtype]`):
            Precisions of which the fastest counts: bfloat16 is slower than float32 on CPUs without instructions for
            it.
        given (`float`, *optional*):
            TFLOP/s to use instead; nothing is measured then.
    """

    def __init__(self, device: str, dtypes: Sequence[torch.dtype], given: float | None = None):
        self.device, self.dtypes, self.given = device, dtypes, given
        self.measured = 0.0
        self._fastest: tuple[int, torch.dtype] | None = None

    def measure(self, times: int = 1) -> None:
        """Multiply matrices: at first of every size and precision, later of the fastest ones only."""
        if self.given is not None:
            return
        candidates = [(size, dtype) for dtype in self.dtypes for size in SIZES[self.device]]
        for size, dtype in candidates if self._fastest is None else [self._fastest]:
            factor = torch.randn(size, size, device=self.device, dtype=dtype)
            for _ in range(times):
                wait(self.device)  # a CUDA product returns before it is computed
                start = time.perf_counter()
                torch.mm(factor, factor)
                wait(self.device)
                tflops = 2 * size**3 / (time.perf_counter() - start) / 1e12
                if tflops > self.measured:
                    self.measured, self._fastest = tflops, (size, dtype)

    @property
    def tflops(self) -> float:
        """The peak, given or measured."""
        return self.measured if self.given is None else self.given

    def share(self, flops: float, seconds: float) -> float:
        """Fraction of the peak that `flops` in `seconds` reach."""
        return flops / seconds / (self.tflops * 1e12)

    def impossible_figure(self, results: list[VariantResult]) -> str | None:
        """Message about a variant whose steps seem faster than the peak; `None` if there is none."""
        for name, share in ((result.name, result.mfu) for result in results):
            if not 0 <= share <= 1:
                source = "was given (`--peak-tflops`)" if self.given else "a matrix product reached beside it"
                return (
                    f"A step of {name} would do {share * self.tflops:.4g} TFLOP/s, which is {share:.0%} of the "
                    f"{self.tflops:.4g} that {source}. No step does more than the device can: the peak is too low, or "
                    "something else ran on the machine while it was measured. Give the peak of the device, or run "
                    "again on an idle machine."
                )
        return None


def wait(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
