"""Faults of a GPU cell, as cells of the report: what each does to its process."""

from __future__ import annotations

import signal
import time
from typing import Any
from unittest import mock

from simulated_gpu import simulated_cuda


__all__ = ["crash", "illegal_access", "stall"]


def illegal_access(seconds: float) -> dict[str, Any]:
    """A kernel that reads past its memory: from then on every operation of the process fails."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
    mock.patch.object(simulated_cuda, "_run", side_effect=error).start()
    simulated_cuda.torch.zeros(1, device="cuda")
    return {"status": "right"}


def crash(seconds: float) -> dict[str, Any]:
    """A library that ends the process."""
    signal.raise_signal(signal.SIGKILL)
    return {"status": "right"}


def stall(seconds: float) -> dict[str, Any]:
    """A kernel that never ends."""
    time.sleep(100 * seconds)
    return {"status": "right"}
