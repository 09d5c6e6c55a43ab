"""Kernels that a step launches on a GPU, and waits of the host in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import trl_padfix
from trl_padfix.tools.bench import Variant
from trl_padfix.tools.bench.steps import Step, attached


__all__ = ["count_launches", "launches_and_waits"]


def count_launches(step: Step, variant: Variant) -> dict[str, int]:
    batch = step.batch(list(range(1 if step.settings.trainer == "grpo" else step.settings.pairs)))
    host = {k: v.cpu() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        attached(step, variant),
        warnings.catch_warnings(record=True) as said,
        torch.profiler.profile(activities=activities) as profile,
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.forward_and_backward(batch, host, variant)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    step.trainer.optimizer.zero_grad()
    return launches_and_waits([event.name() for event in profile.profiler.kineto_results.events()], said)


def launches_and_waits(events: Iterable[str], said: Iterable[Any]) -> dict[str, int]:
    """
    Counts of a step on CUDA: `launches`, `synchronisations`, and `own_synchronisations`, which a line of trl_padfix
    causes; from the names that the profiler saw, and the warnings of torch's debug mode for synchronisations.
    """
    package = Path(trl_padfix.__file__).parent
    waits = [w for w in said if "synchronizing CUDA operation" in str(w.message)]
    own = [w for w in waits if w.filename.startswith(str(package))]
    own = [w for w in own if not w.filename.startswith(str(package / "tools" / "bench"))]
    return {
        "launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in events),
        "synchronisations": len(waits),
        "own_synchronisations": len(own),
    }
