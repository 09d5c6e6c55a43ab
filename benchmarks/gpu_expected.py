"""
Least time of a step on a device by a roofline: its operations at the speeds of the data sheet.

    PYTHONPATH=tests python benchmarks/gpu_expected.py    # a table of devices, counted on a simulated one
    python benchmarks/gpu_expected.py --cpu               # beside measured steps on this CPU, with the operations of
                                                          # TRL's step that exceed their least time most

Each operation is one launch. Device and host work at the same time:

    time = max(sum of max(flops / peak, bytes / bandwidth), launches * launch cost)

No step can be faster, so tokens per second are an upper bound. Real kernels reach 0.5 to 0.8 of a peak. Caches, waits
and the work of the host between launches are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from unittest import mock

import torch
from gpu_counts import Operation, OperationCounter, count_operations
from gpu_plan import SPREAD, plan_of
from gpu_table import NAMES, line_of

from trl_padfix.tools.bench.building import prepare
from trl_padfix.tools.bench.data import select_rows
from trl_padfix.tools.bench.peak import Peak
from trl_padfix.tools.bench.settings import VARIANTS, BenchSettings
from trl_padfix.tools.bench.steps import attached


__all__ = ["DEVICES", "Device", "expected_seconds", "known_device", "on_simulated_device"]


@dataclass(frozen=True)
class Device:
    """Peaks of a device."""

    half: float  # TFLOP/s of dense matrix products in bfloat16
    single: float  # TFLOP/s of those in float32
    bandwidth: float  # TB/s of its memory
    launch: float  # microseconds of the host per kernel
    source: str  # page of the vendor
    overlaps: bool = True  # whether the host continues while the device computes

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
    return max(computing, launching) if device.overlaps else computing + launching


def known_device(name: str) -> Device | None:
    """Device for a name of torch, such as "NVIDIA H100 80GB HBM3"; `None` if it is not in the table."""
    # Whole words of the part before a hyphen ("NVIDIA A100-SXM4-80GB"): "RTX A1000" is no "A100".
    return next((device for short, device in DEVICES.items() if short in name.split("-")[0].upper().split()), None)


def on_simulated_device(
    settings: BenchSettings, data: str | None, *, shapes_only: bool = True
) -> dict[str, tuple[list[Operation], int]]:
    """
    Operations of a step of each variant and the real tokens of its batch, counted without a GPU.

    With `shapes_only` tensors have no values, so models of any size fit in memory.
    """
    from simulated_gpu.simulated_cuda import simulated_cuda  # the tests' simulated GPU: `PYTHONPATH=tests`
    from simulated_gpu.simulated_steps import CUDA, on_simulated, place_models

    # The model is built on the CPU. Only the step runs on the simulated device.
    on_cpu = replace(settings, device="cpu", steps=1, warmup=0)
    step = prepare(select_rows(data, on_cpu, spread=SPREAD)[0], on_cpu)
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


def _beside_cpu() -> Iterator[str]:
    """Measured steps on this CPU beside their least time at its measured peaks; then TRL's step by operation."""
    settings = BenchSettings(trainer="dpo", pairs=4, steps=1, warmup=0, shape="small", device="cpu", memory=False)
    step = prepare(select_rows("lengths:96/64", settings, spread=SPREAD)[0], settings)
    device, rows = _this_cpu(), list(range(4))
    yield from (line_of(["variant", "expected s", "measured s", "ratio"]), line_of(["---"] * 4))
    for name in step.settings.variants:
        operations, _ = count_operations(step, VARIANTS[name])
        with attached(step, VARIANTS[name]):
            seconds = median(step.run(rows, VARIANTS[name])["seconds"] for _ in range(5))
        expected = expected_seconds(operations, device)
        yield line_of([NAMES[name], f"{expected:.3f}", f"{seconds:.3f}", f"{expected / seconds:.2f}"])
    speeds = (
        f"{device.single * 1e3:.0f} GFLOP/s, {device.bandwidth * 1e3:.1f} GB/s, {device.launch:.1f} us an operation"
    )
    yield from ("", f"{torch.get_num_threads()} threads, float32: {speeds}.", "")
    with OperationCounter() as forward_and_backward:
        step.forward_and_backward(step.to_device(step.collate(rows)), {}, VARIANTS["trl"])
    with OperationCounter() as optimizer:
        step.trainer.optimizer.step()
    by_name = {"optimizer": optimizer.operations}
    for operation in forward_and_backward.operations:
        by_name.setdefault(operation.name, []).append(operation)
    yield from (line_of(["TRL's step", "operations", "expected s", "measured s", "beyond"]), line_of(["---"] * 5))
    lines = []
    for name, operations in by_name.items():
        expected, measured = sum(map(device.seconds, operations)), sum(o.seconds for o in operations)
        lines.append((measured - expected, name, len(operations), expected, measured))
    for beyond, name, count, expected, measured in sorted(lines, reverse=True)[:12]:
        yield line_of([f"`{name}`", f"{count:,}", f"{expected:.3f}", f"{measured:.3f}", f"{beyond:.3f}"])


def _this_cpu() -> Device:
    """Measured peaks of this CPU: matrix product, copy of a large tensor, operation on a small tensor."""
    peak = Peak("cpu", [torch.float32])
    peak.measure(times=5)
    target, source, small = torch.ones(2**25), torch.ones(2**25), torch.ones(8, requires_grad=True)
    # Into memory that exists already: new memory would be handed out page by page, at a fifth of the speed.
    bandwidth = 2 * target.numel() * 4 / _fastest(lambda: target.copy_(source)) / 1e12
    launch = _fastest(lambda: [small * 2 for _ in range(1000)]) * 1e3  # seconds of 1000 operations: us of one
    return Device(peak.tflops, peak.tflops, bandwidth, launch, "measured", overlaps=False)


def _fastest(run: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="beside measured steps on this CPU")
    options = parser.parse_args()
    for line in _beside_cpu() if options.cpu else _table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
