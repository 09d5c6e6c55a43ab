"""
Least time of a step on a device by a roofline: its operations at the speeds of the data sheet.

    PYTHONPATH=tests python benchmarks/gpu_expected.py    # a table of devices, counted on a simulated one

Each operation is one launch. Device and host work at the same time:

    time = max(sum of max(flops / peak, bytes / bandwidth), launches * launch cost)

No step can be faster, so tokens per second are an upper bound. Real kernels reach 0.5 to 0.8 of a peak. Caches, waits
and the work of the host between launches are left out. Operations are counted on any device, the simulated GPU of the
tests included; nothing is timed for a figure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench import VARIANTS, BenchStep, Settings, Variant, attached, decoder_inputs, prepare, profiled, select_rows
from gpu_plan import plan_of
from gpu_table import NAMES, line_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trl_padfix


__all__ = [
    "DEVICES", "Device", "Operation", "OperationCounter", "count_launches", "count_operations", "expected_seconds",
    "known_device", "launches_and_waits", "on_simulated_device",
]  # fmt: skip

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


class OperationCounter(TorchDispatchMode):
    """Records the operations within the block, on whatever device they run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not (func.is_view or name in NO_KERNELS):
            inputs = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            moved = outputs * 2 if name in GATHERS else inputs + outputs  # a gather reads what it writes
            size = sum(x.numel() * x.element_size() for x in moved)
            is_half = any(x.dtype in (torch.bfloat16, torch.float16) for x in inputs)
            self.operations.append(Operation(name, _flops(name, args), size, is_half))
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
        step.forward_and_backward(batch)
    step.trainer.optimizer.zero_grad()
    # AdamW reads weight, gradient and 2 moments, and writes all but the gradient: 4 + 3.
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
            step.forward_and_backward(batch)
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
    return {
        "launches": sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in events),
        "synchronisations": len(waits),
        "own_synchronisations": len(own),
    }


def _first_batch(step: BenchStep) -> dict[str, torch.Tensor]:
    return step.collate(list(range(step.settings.batch_rows)))


@dataclass(frozen=True)
class Device:
    """Peaks of a device."""

    half: float  # TFLOP/s of dense matrix products in bfloat16
    single: float  # TFLOP/s of those in float32
    bandwidth: float  # TB/s of its memory
    launch: float  # microseconds of the host per kernel
    source: str  # page of the vendor

    def seconds(self, operation: Operation) -> float:
        """Least time of an operation without its launch: the longer of arithmetic and memory traffic."""
        peak = self.half if operation.is_half else self.single
        return max(operation.flops / (peak * 1e12), operation.bytes / (self.bandwidth * 1e12))


LAUNCH = 3.8
"""
Microseconds between two launches of short kernels without waits, measured by NVIDIA on a V100:
https://developer.nvidia.com/blog/cuda-graphs/. The cost of torch comes on top.
"""

DEVICES = {
    "A100": Device(312, 19.5, 2.039, LAUNCH, "https://www.nvidia.com/en-us/data-center/a100/"),
    "H100": Device(989, 67, 3.35, LAUNCH, "https://www.nvidia.com/en-us/data-center/h100/"),
    "H200": Device(989, 67, 4.8, LAUNCH, "https://www.nvidia.com/en-us/data-center/h200/"),
    "B200": Device(2250, 75, 8.0, LAUNCH, "https://www.nvidia.com/en-us/data-center/hgx/"),
    "MI300X": Device(
        1307, 163.4, 5.3, LAUNCH, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"
    ),
}
"""SXM and OAM modules with at least 80 GB. Where NVIDIA gives peaks for sparse matrices, half of them."""

SHOWN = (
    "DPO 0.5B 8 pairs, autocast", "DPO 0.5B 64 pairs, autocast, checkpointing", "SFT 0.5B 16 rows, autocast",
)  # fmt: skip
"""Cells of the table. Models of 7B take too much memory without a GPU."""


def expected_seconds(operations: Iterable[Operation], device: Device) -> float:
    """Least time of operations on a device."""
    operations = list(operations)
    computing, launching = sum(map(device.seconds, operations)), len(operations) * device.launch / 1e6
    return max(computing, launching)


def known_device(name: str) -> Device | None:
    """Device for a name of torch, such as "NVIDIA H100 80GB HBM3"; `None` if it is not in the table."""
    # Whole words of the part before a hyphen ("NVIDIA A100-SXM4-80GB"): "RTX A1000" is no "A100".
    return next((device for short, device in DEVICES.items() if short in name.split("-")[0].upper().split()), None)


def on_simulated_device(
    settings: Settings, data: str | None, *, shapes_only: bool = True
) -> dict[str, tuple[list[Operation], int]]:
    """
    Operations of a step of each variant and the real tokens of its batch, counted without a GPU.

    With `shapes_only` tensors have no values, so models of any size fit in memory.
    """
    from simulated_gpu.simulated_cuda import simulated_cuda  # the tests' simulated GPU: `PYTHONPATH=tests`
    from simulated_gpu.simulated_steps import CUDA, on_simulated, place_models

    # The model is built on the CPU. Only the step runs on the simulated device.
    on_cpu = replace(settings, device="cpu", steps=1, warmup=0)
    step = prepare(select_rows(data, on_cpu)[0], on_cpu)
    step.settings = replace(settings, device="cuda:0")
    with simulated_cuda(shapes_only=shapes_only), mock.patch.object(type(step.trainer.accelerator), "device", CUDA):
        place_models(step.trainer)
        return {name: count_operations(step, VARIANTS[name], on_simulated) for name in settings.variants}


def _table() -> Iterator[str]:
    """Cells of the report with the tokens per second of each device, in Markdown."""
    yield line_of(["step", "variant", "launches", "TFLOP", *DEVICES, "x TRL"])
    yield line_of(["---"] * 2 + ["---:"] * (3 + len(DEVICES)))
    for cell in plan_of(backend=None):
        if cell.name not in SHOWN:
            continue
        counts = on_simulated_device(cell.settings, cell.data)
        seconds = {name: [expected_seconds(ops, d) for d in DEVICES.values()] for name, (ops, _) in counts.items()}
        for name, (operations, real) in counts.items():
            gains = [theirs / ours for theirs, ours in zip(seconds["trl"], seconds[name], strict=True)]
            yield line_of([
                cell.name if name == "trl" else "", NAMES[name], f"{len(operations):,}",
                f"{sum(o.flops for o in operations) / 1e12:.1f}",
                *(f"{real / s:,.0f}" for s in seconds[name]), f"{min(gains):.1f} to {max(gains):.1f}",
            ])  # fmt: skip


def main() -> None:
    for line in _table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
