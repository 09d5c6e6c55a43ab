"""
The time that a step would take if a device did nothing but what is counted, at the speeds of its data sheet.

    PYTHONPATH=tests python benchmarks/gpu_expected.py    # the table of docs/gpu.md: counted on a simulated device
    python benchmarks/gpu_expected.py --cpu               # the same beside steps that are timed, on this CPU; and
                                                          # where the time of TRL's step goes beyond what is expected

Of every operation of a step the arithmetic and the bytes are counted, and that it is one launch. A device needs for it
the longer of arithmetic / peak and bytes / bandwidth, and the host a launch cost; the two work side by side:

    time = max(sum of max(flops / peak, bytes / bandwidth), launches * launch cost)

No step can be quicker, so tokens per second are an upper bound. Real kernels reach 0.5 to 0.8 of a peak, and caches,
waits and what the host does between launches are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from unittest import mock

import torch
from gpu_plan import plan_of
from gpu_table import NAMES, line_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trl_padfix.tools.bench import BenchSettings, Variant, pairs_of_lengths, parse_lengths, prepare
from trl_padfix.tools.bench.peak import Peak
from trl_padfix.tools.bench.settings import VARIANTS
from trl_padfix.tools.bench.steps import Step, attached, decoder_inputs


__all__ = ["DEVICES", "Counted", "Device", "count_step", "expected_seconds", "known_device", "on_simulated_device"]


@dataclass(frozen=True)
class Device:
    """What a device can do at the most."""

    half: float  # TFLOP/s of dense matrix products in bfloat16
    single: float  # and in float32
    bandwidth: float  # TB/s of its memory
    launch: float  # microseconds of the host for a kernel
    source: str
    overlaps: bool = True  # whether the host goes on while the device computes


LAUNCH = 3.8
"""
Microseconds between two launches of short kernels without waits between them, as NVIDIA measured them on a V100:
https://developer.nvidia.com/blog/cuda-graphs/. torch adds its own to that.
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
"""SXM and OAM modules of 80 GB and more; NVIDIA's figures for sparse matrices are halved."""

SHOWN = (
    "DPO 0.5B 8 pairs, autocast", "DPO 0.5B 64 pairs, autocast, checkpointing", "SFT 0.5B 16 rows, autocast",
)  # fmt: skip
"""Cells of the report that the table has: models of 7B take too much memory without a GPU."""

_GATHERS = frozenset(["embedding", "gather", "index", "index_select"])
_NO_KERNELS = frozenset(
    ["_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "is_same_size", "lift_fresh",
     "new_empty", "new_empty_strided", "resize_", "set_"]
)  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """
    One launch: its name, floating-point operations of matrix products, bytes read and written, and precision; and the
    seconds that it took, which on a device that computes beside the host says nothing.
    """

    name: str
    flops: float
    bytes: int
    half: bool
    taken: float = field(default=0.0, compare=False)

    def seconds(self, device: Device) -> float:
        peak = device.half if self.half else device.single
        return max(self.flops / (peak * 1e12), self.bytes / (device.bandwidth * 1e12))


class Counted(TorchDispatchMode):
    """Counts the operations within the block, on whatever device they run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        start = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        taken, name = time.perf_counter() - start, func._schema.name.split("::")[1]
        if not (func.is_view or name in _NO_KERNELS):
            given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            made = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
            size = sum(x.numel() * x.element_size() for x in (made * 2 if name in _GATHERS else given + made))
            half = any(x.dtype in (torch.bfloat16, torch.float16) for x in given)  # and sums in float32
            self.operations.append(Operation(name, _flops(name, args), size, half, taken))
        return output


def _flops(name: str, args: tuple) -> float:
    if name in ("_varlen_attn", "_varlen_attn_backward"):
        # A query sees the keys up to its own place; backward takes five products where forward takes two.
        query, cu_q, cu_k = (args[0], *args[3:5]) if name == "_varlen_attn" else (args[1], *args[6:8])
        lengths = zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True)
        pairs = sum(q * k - q * (q - 1) / 2 for q, k in lengths)
        return (4 if name == "_varlen_attn" else 10) * pairs * query.shape[1] * query.shape[2]
    if name.startswith("_scaled_dot_product"):
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]
        return (10 if backward else 4) * query.numel() * key.shape[-2]
    if name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = args[1:3] if "add" in name else args[:2]
        return 2 * left.numel() * right.shape[-1]
    return 0.0


def expected_seconds(operations: Iterable[Operation], device: Device) -> float:
    """The time that a device needs for operations, at the least."""
    operations = list(operations)
    computing, launching = sum(o.seconds(device) for o in operations), len(operations) * device.launch / 1e6
    return max(computing, launching) if device.overlaps else computing + launching


def known_device(name: str) -> Device | None:
    """The device of a name as torch gives it ("NVIDIA H100 80GB HBM3"), if it is in the table."""
    return next((device for short, device in DEVICES.items() if short in name.split("-")[0].upper().split()), None)


def count_step(
    step: Step, variant: Variant, place: Callable[[Any], Any] = lambda batch: batch
) -> tuple[list[Operation], int]:
    """
    The operations of a step of a variant on its first batch, optimizer included, and the batch's real tokens.

    `place` puts a batch onto the device.
    """
    batch = step.batch(list(range(step.settings.batch_rows)))
    host = {k: v.cpu() for k, v in batch.items() if isinstance(v, torch.Tensor)}
    real = int(decoder_inputs(host)["attention_mask"].sum())
    batch = place(batch)
    with attached(step, variant), Counted() as counted:
        step.forward_and_backward(batch, host, variant)
    step.trainer.optimizer.zero_grad()
    if step.settings.optimizer:  # AdamW reads weight, gradient and two moments, and writes all but the gradient
        trained = sum(p.numel() * p.element_size() for p in step.trainer.model.parameters() if p.requires_grad)
        counted.operations.append(Operation("optimizer", 0.0, 7 * trained, False))
    return counted.operations, real


def on_simulated_device(
    settings: BenchSettings, lengths: tuple[int, int], *, shapes_only: bool = True
) -> dict[str, tuple[list[Operation], int]]:
    """The operations of a step of each variant, and its real tokens, counted without a GPU."""
    from kit.simulated_cuda import simulated_cuda
    from kit.simulated_steps import CUDA, on_simulated, place_models

    found = {}
    pairs = None if settings.trainer == "grpo" else pairs_of_lengths(settings.pairs, *lengths, 0.75, settings.seed)
    step = prepare(pairs, replace(settings, device="cpu", steps=1, warmup=0))
    step.settings = replace(settings, device="cuda:0")
    with simulated_cuda(shapes_only=shapes_only), mock.patch.object(type(step.trainer.accelerator), "device", CUDA):
        place_models(step.trainer)
        for name in settings.variants:
            found[name] = count_step(step, VARIANTS[name], on_simulated)
    return found


def _table() -> Iterator[str]:
    """Cells of the report, each with the tokens per second of every device, in Markdown."""
    yield line_of(["step", "variant", "launches", "TFLOP", *DEVICES, "x TRL"])
    yield line_of(["---"] * 2 + ["---:"] * (3 + len(DEVICES)))
    for cell in plan_of(backend=None):
        if cell.name not in SHOWN:
            continue
        counted = on_simulated_device(cell.settings, parse_lengths(cell.lengths) if cell.lengths else (0, 0))
        seconds = {name: [expected_seconds(ops, d) for d in DEVICES.values()] for name, (ops, _) in counted.items()}
        for name, (operations, real) in counted.items():
            gains = [theirs / ours for theirs, ours in zip(seconds["trl"], seconds[name], strict=True)]
            yield line_of([
                cell.name if name == "trl" else "", NAMES[name], f"{len(operations):,}",
                f"{sum(o.flops for o in operations) / 1e12:.1f}",
                *(f"{real / s:,.0f}" for s in seconds[name]), f"{min(gains):.1f} to {max(gains):.1f}",
            ])  # fmt: skip


def _beside_cpu() -> Iterator[str]:
    """Steps that are timed on this CPU, beside what they would take at the speeds that it is measured to have."""
    given = dict(trainer="dpo", pairs=4, steps=1, warmup=0, shape="small", device="cpu", memory=False)
    step = prepare(pairs_of_lengths(4, 96, 64, 0.75, 0), BenchSettings(**given))
    device, batch = _this_cpu(), step.batch(list(range(4)))
    yield from (line_of(["variant", "expected s", "measured s", "ratio"]), line_of(["---"] * 4))
    for name in step.settings.variants:
        operations, _ = count_step(step, VARIANTS[name])
        with attached(step, VARIANTS[name]):
            seconds = median(step.run(batch, VARIANTS[name])["seconds"] for _ in range(5))
        expected = expected_seconds(operations, device)
        yield line_of([NAMES[name], f"{expected:.3f}", f"{seconds:.3f}", f"{expected / seconds:.2f}"])
    speeds = (
        f"{device.single * 1e3:.0f} GFLOP/s, {device.bandwidth * 1e3:.1f} GB/s, {device.launch:.1f} us an operation"
    )
    yield from ("", f"{torch.get_num_threads()} threads, float32: {speeds}.", "")
    with Counted() as forward_and_backward:
        step.forward_and_backward(batch, {}, VARIANTS["trl"])
    with Counted() as optimizer:
        step.trainer.optimizer.step()
    parts = {"optimizer": optimizer.operations}
    for operation in forward_and_backward.operations:
        parts.setdefault(operation.name, []).append(operation)
    yield from (line_of(["TRL's step", "operations", "expected s", "measured s", "beyond"]), line_of(["---"] * 5))
    beyond = {name: sum(o.taken - o.seconds(device) for o in found) for name, found in parts.items()}
    for name in sorted(parts, key=lambda name: -beyond[name])[:12]:
        figures = (sum(o.seconds(device) for o in parts[name]), sum(o.taken for o in parts[name]), beyond[name])
        yield line_of([f"`{name}`", f"{len(parts[name]):,}", *(f"{figure:.3f}" for figure in figures)])


def _this_cpu() -> Device:
    """The best product of matrices, copy of a large tensor, and operation on a small one."""
    peak = Peak("cpu", [torch.float32])
    peak.measure(times=5)
    large, other, small = torch.ones(2**25), torch.ones(2**25), torch.ones(8, requires_grad=True)
    bandwidth = 2 * large.numel() * 4 / _quickest(lambda: large.copy_(other)) / 1e12  # into memory that is there
    launch = _quickest(lambda: [small * 2 for _ in range(1000)]) * 1e3  # microseconds of one of a thousand
    return Device(peak.tflops, peak.tflops, bandwidth, launch, "measured", overlaps=False)


def _quickest(run: Callable[[], Any], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="beside steps that are timed on this CPU")
    given = parser.parse_args()
    for line in _beside_cpu() if given.cpu else _table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
