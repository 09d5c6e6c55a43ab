"""
Counts of a step: its operations with their arithmetic and bytes, and on CUDA kernel launches and waits of the host.

They are counted on any device, the simulated GPU of the tests included; nothing is timed for a figure.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trl_padfix
from trl_padfix.tools.bench.settings import Variant
from trl_padfix.tools.bench.steps import BenchStep, attached, decoder_inputs, profiled


__all__ = ["Operation", "OperationCounter", "count_launches", "count_operations", "launches_and_waits"]

PACKAGE = Path(trl_padfix.__file__).parent

GATHERS = frozenset(["embedding", "gather", "index", "index_select"])
"""Operations that read as many elements as they write, however large their first argument is."""

NO_KERNELS = frozenset(
    ["_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "is_same_size", "lift_fresh",
     "new_empty", "new_empty_strided", "resize_", "set_"]
)  # fmt: skip
"""Operations that launch no kernel, although their schema marks them as no view."""


@dataclass(frozen=True)
class Operation:
    """One operation, counted as one kernel launch."""

    name: str
    flops: float  # of matrix products; elementwise arithmetic is bounded by its bytes
    bytes: int  # read and written
    is_half: bool  # whether an argument is bfloat16 or float16
    seconds: float = field(default=0.0, compare=False)  # on the host; without meaning on asynchronous devices


class OperationCounter(TorchDispatchMode):
    """Records the operations within the block, on whatever device they run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        start = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        seconds, name = time.perf_counter() - start, func.overloadpacket.__name__
        if not (func.is_view or name in NO_KERNELS):
            inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            moved = outputs * 2 if name in GATHERS else inputs + outputs  # a gather reads what it writes
            size = sum(x.numel() * x.element_size() for x in moved)
            is_half = any(x.dtype in (torch.bfloat16, torch.float16) for x in inputs)
            self.operations.append(Operation(name, _flops(name, args), size, is_half, seconds))
        return output


def _flops(name: str, args: tuple[Any, ...]) -> float:
    """Floating-point operations of a matrix product or an attention; 0 for others."""
    if name in ("_varlen_attn", "_varlen_attn_backward"):
        query, cu_q, cu_k = (args[0], *args[3:5]) if name == "_varlen_attn" else (args[1], *args[6:8])
        lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
        # Causal, aligned at the end: q queries attend to k - q + 1, ..., k keys.
        pairs = sum(q * k - q * (q - 1) / 2 for q, k in lengths)
        # Forward: 2 products (QK, PV) of 2 flops per pair and channel. Backward: 5 products.
        return (4 if name == "_varlen_attn" else 10) * pairs * query.shape[1] * query.shape[2]
    if name.startswith("_scaled_dot_product"):
        is_backward = "backward" in name
        query, key = args[1:3] if is_backward else args[:2]
        return (10 if is_backward else 4) * query.numel() * key.shape[-2]
    if name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = args[1:3] if "add" in name else args[:2]
        return 2 * a.numel() * b.shape[-1]
    return 0.0


def count_operations(
    step: BenchStep, variant: Variant, place: Callable[[Any], Any] = lambda batch: batch
) -> tuple[list[Operation], int]:
    """
    Count the operations of a step of a variant on its first batch.

    Args:
        step ([`BenchStep`]):
            Step to run.
        variant ([`Variant`]):
            Variant to attach.
        place (`Callable`, *optional*):
            Function that moves a batch to the device.

    Returns:
        `tuple[list[Operation], int]`: The operations, optimizer included, and the real tokens of the batch.
    """
    host = _first_batch(step)
    real = int(decoder_inputs(host)["attention_mask"].sum())
    batch = place(step.to_device(host))
    with attached(step, variant), OperationCounter() as counter:
        step.forward_and_backward(batch, host, variant)
    step.trainer.optimizer.zero_grad()
    if step.settings.optimizer:  # AdamW reads weight, gradient and 2 moments, and writes all but the gradient: 4 + 3
        trained = sum(p.numel() * p.element_size() for p in step.trainer.model.parameters() if p.requires_grad)
        counter.operations.append(Operation("optimizer", 0.0, 7 * trained, False))
    return counter.operations, real


def count_launches(step: BenchStep, variant: Variant) -> dict[str, int]:
    """Count the kernel launches and the waits of the host in a step on CUDA, optimizer left out."""
    host = _first_batch(step)
    batch = step.to_device(host)  # before the debug mode: this copy is a wait that no training has
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        attached(step, variant),
        warnings.catch_warnings(record=True) as caught,
        profiled(activities=activities) as profile,
    ):
        warnings.simplefilter("always")  # by default a warning of the same line is recorded once
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step.forward_and_backward(batch, host, variant)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    step.trainer.optimizer.zero_grad()
    return launches_and_waits([event.name() for event in profile.profiler.kineto_results.events()], caught)


def launches_and_waits(events: Iterable[str], caught: Iterable[warnings.WarningMessage]) -> dict[str, int]:
    """
    Counts of a step on CUDA.

    Args:
        events (`Iterable[str]`):
            Names that the profiler recorded.
        caught (`Iterable[warnings.WarningMessage]`):
            Warnings of torch's debug mode for synchronisations.

    Returns:
        `dict[str, int]`: `launches`, `synchronisations`, and `own_synchronisations`: those that a line of this package
        causes.
    """
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    own = [w for w in waits if w.filename.startswith(str(PACKAGE))]
    # The benchmark synchronises too, which no training does.
    own = [w for w in own if not w.filename.startswith(str(PACKAGE / "tools/bench"))]
    return {
        "launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in events),
        "synchronisations": len(waits),
        "own_synchronisations": len(own),
    }


def _first_batch(step: BenchStep) -> dict[str, torch.Tensor]:
    return step.collate(list(range(step.settings.batch_rows)))
