"""
The cells of a GPU report, in the order in which they run: kernels, models, bits of rows, times of steps.

A figure of correctness has a limit, and a computation that is wrong on purpose must exceed it: otherwise the check
would pass for any computation.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench import VARIANTS, BenchStep, Settings, Variant, attached, measure, prepare, profiled, select_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

import trl_padfix
from trl_padfix import prefix_sharing_layout, remove_padding
from trl_padfix.core.attention import attention
from trl_padfix.core.attention.attention import torch_varlen, torch_varlen_is_complete
from trl_padfix.core.attention.segments import sum_by_token


__all__ = ["Cell", "Check", "FlopCounter", "NotInstalledError", "check_kernel", "check_model", "plan_of"]

TESTS = Path(__file__).resolve().parents[1] / "tests"


@dataclass(frozen=True)
class Cell:
    """One part of a report. `run` is called in another process with the seconds that it may take."""

    name: str
    run: Callable[[float], dict[str, Any]]
    seconds: float  # limit; a cell still running after them is killed
    device: str = "cuda"  # "simulated": the simulated GPU of the tests


@dataclass(frozen=True)
class Check:
    """A figure, its limit, and the figure of a wrong computation; `None` for counts."""

    name: str
    figure: float
    limit: float
    control: float | None = None

    @property
    def ok(self) -> bool:
        detects_errors = self.control is None or not self.control <= self.limit  # NaN of a wrong computation: an error
        return bool(self.figure <= self.limit) and detects_errors

    def __str__(self) -> str:
        control = "" if self.control is None else f"; a wrong computation gives {self.control:.2e}"
        return f"{'ok' if self.ok else 'WRONG'}: {self.name}: {self.figure:.2e} (at most {self.limit:.2e}{control})"


class NotInstalledError(Exception):
    """A package or a tool that a cell needs is missing."""


def plan_of(*, toy: bool = False, data: str | None = None) -> list[Cell]:
    """The cells of a report; with `toy` all of them at a size for the simulated GPU. `data` as for `bench.py`."""
    kernels = [
        (f"{name}, heads of {size}", partial(check_kernel, name, size, toy=toy), 30)
        for name, size in product(KERNELS, (64, 128, 256))
    ]
    models = [(f"a model in {p}", partial(check_model, p, toy=toy), 40) for p in ("float32", "autocast", "bfloat16")]
    bits = [(f"bits of a row, {p}", partial(compare_bits, p, toy=toy), 30) for p in ("float32", "bfloat16")]
    sanitizer = ("compute-sanitizer", partial(sanitize, toy=toy), 60)
    device = "simulated" if toy else "cuda"
    cells = [Cell(*cell, device=device) for cell in (*kernels, sanitizer, *models, *bits)]
    return cells + [_times(*row, toy=toy, data=data) for row in TIMES]


# -- varlen kernels against float64


LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025)
"""Lengths of segments and of their prefixes: kernels work in tiles of 64 or 128 tokens."""


def _torch_kernel() -> Callable[..., torch.Tensor]:
    if not torch_varlen_is_complete():
        raise NotInstalledError(f"torch {torch.__version__} on this GPU has no varlen attention")
    return lambda q, k, v, *segments: torch_varlen(q, k, v, segments, None, None)  # type: ignore[arg-type]


def _flash_kernel(module: str, *, toy: bool) -> Callable[..., torch.Tensor]:
    if not toy and find_spec(module) is None:
        raise NotInstalledError(f"{module} is not installed")
    function = importlib.import_module("simulated_gpu.reference_flash_attn" if toy else module).flash_attn_varlen_func

    def attend(*states_and_segments: Any) -> torch.Tensor:
        found = function(*states_and_segments, causal=True)
        return found[0] if isinstance(found, tuple) else found  # older FlashAttention 3 returns sums of weights, too

    return attend


KERNELS: dict[str, Callable[[bool], Callable[..., torch.Tensor]]] = {
    "torch's varlen attention": lambda toy: _torch_kernel(),
    "FlashAttention 2": lambda toy: _flash_kernel("flash_attn", toy=toy),
    "FlashAttention 3": lambda toy: _flash_kernel("flash_attn_interface", toy=toy),
}


def check_kernel(
    kernel: str, size: int, seconds: float = 0, *, toy: bool = False, lengths: Sequence[int] | None = None
) -> dict[str, Any]:
    """
    Compare launches of a varlen kernel with float64: as many queries as keys and fewer, forward and backward.

    Inputs have unit variance, so output and gradients of a segment are of the size of its weights. The figure is the
    largest distance of a segment, relative to that size.
    """
    attend, checks = KERNELS[kernel](toy), []
    lengths = lengths or ((1, 63, 65) if toy else LENGTHS)
    segments = [(queries, prefix + queries) for queries in lengths for prefix in (0, *lengths)]
    bounds = [torch.tensor([0, *side], device="cuda").cumsum(0).int() for side in zip(*segments, strict=True)]
    longest = [max(side) for side in zip(*segments, strict=True)]
    for dtype, (heads, kv_heads) in product((torch.bfloat16, torch.float16), ((4, 4), (8, 2))):
        torch.manual_seed(0)
        total = [int(side[-1]) for side in bounds]
        shapes = [(total[0], heads), *[(total[1], kv_heads)] * 2, (total[0], heads)]
        *states, upstream = (torch.randn(*shape, size, device="cuda").to(dtype) for shape in shapes)
        states = [state.requires_grad_() for state in states]
        run = partial(attend, *states, *bounds, *longest)
        outputs = {"": run(), ", checkpointed": checkpoint(run, use_reentrant=False)}
        found = {n: [o.detach(), *torch.autograd.grad(o, states, upstream)] for n, o in outputs.items()}
        errors, control = dict.fromkeys(found, 0.0), 0.0
        ends = [side.tolist() for side in bounds]
        for i in range(len(segments)):
            q, k = (slice(side[i], side[i + 1]) for side in ends)
            places = (q, q, k, k)
            inputs = [x.detach()[s] for x, s in zip((*states, upstream), (q, k, k, q), strict=True)]
            exact, scale = _exact(*inputs)
            for name, tensors in found.items():
                parts = [tensor[place] for tensor, place in zip(tensors, places, strict=True)]
                errors[name] = max(errors[name], _distance(parts, exact, scale))
            if segments[i][0] == 63:  # a mask one key short
                control = max(control, _distance(_exact(*inputs, shift=1)[0], exact, scale))
        name = f"{kernel}, heads of {size}, {heads} on {kv_heads}, {str(dtype).partition('.')[2]}"
        limit = torch.finfo(dtype).eps
        checks += [Check(name + way, error, limit, control) for way, error in errors.items()]
    return _checked(checks)


def _exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor, shift: int = 0
) -> tuple[list[torch.Tensor], float]:
    """Output and gradients of a segment in float64, and the size of its weights."""
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    q, k, v = (x.transpose(0, 1) for x in leaves)
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(
        k.shape[1] - q.shape[1] + 1 - shift
    )
    weights = (q @ k.mT / math.sqrt(q.shape[2])).masked_fill(hidden, -torch.inf).softmax(-1)
    output = (weights @ v).transpose(0, 1)
    gradients = torch.autograd.grad(output, leaves, upstream.double())
    return [output.detach(), *gradients], math.sqrt(q.shape[2]) * weights.detach().norm().item()


def _distance(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], scale: float) -> float:
    distances = [(a.double() - b).norm().item() for a, b in zip(found, exact, strict=True)]
    return max(distances, key=lambda d: math.inf if math.isnan(d) else d) / scale


def _checked(checks: list[Check]) -> dict[str, Any]:
    wrong = [str(check) for check in checks if not check.ok]
    status = f"wrong: {wrong[0]}" if wrong else "right"
    return {"status": status, "checks": [{**asdict(check), "ok": check.ok} for check in checks]}


def sanitize(seconds: float, *, toy: bool = False) -> dict[str, Any]:
    """Launches of torch's kernel on short segments under compute-sanitizer, which finds accesses out of bounds."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise NotInstalledError("compute-sanitizer is not installed")
    call = f"check_kernel('torch\\'s varlen attention', 64, toy={toy}, lengths=(1, 63, 65))"
    code = f"import gpu_cells as g\nwith g.on_device('{'simulated' if toy else 'cuda'}'): print(g.{call}['status'])"
    command = [tool, "--error-exitcode=86", sys.executable, "-c", code]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=0.9 * seconds)
    if run.returncode == 0 and "right" in run.stdout.splitlines():
        return {"status": "right", "checks": []}
    return {"status": f"wrong: exit status {run.returncode}: {(run.stdout + run.stderr).strip()[-300:]}"}


@contextlib.contextmanager
def on_device(name: str) -> Iterator[Any]:
    """Simulate a GPU until the block ends, if `name` is `"simulated"`; yields what the simulated one counts."""
    if name != "simulated":
        yield None
        return
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    from simulated_gpu.simulated_cuda import simulated_cuda

    with simulated_cuda() as counts:
        yield counts


# -- models: packed against padded


def check_model(precision: str, seconds: float = 0, *, toy: bool = False) -> dict[str, Any]:
    """Compare log-probabilities and gradients of packed batches with those of padded ones in float32."""
    ids, mask = (_placed(x, toy) for x in _pairs(rows=8, columns=24 if toy else 700))
    exact = _Figures.of(_model(toy), ids, mask)
    padded = _Figures.of(_model(toy, precision), ids, mask, precision)
    # In half precision a packed forward may be as far from float32 as the padded one, with half of it to spare.
    limit = 1e-4 if precision == "float32" else 1.5 * padded.distance(exact) + 1e-3
    leaking = _Figures.of(_model(toy, precision), ids, mask, precision, "leaking").distance(exact)
    checks = []
    for mode in ("padding-free", "prefix sharing"):
        packed = _Figures.of(_model(toy, precision), ids, mask, precision, mode)
        name = f"{mode}, {precision}: distance of log-probabilities and gradients from padded float32"
        checks.append(Check(name, packed.distance(exact), limit, leaking))
        if precision != "float32" and torch_varlen_is_complete():
            name = f"{mode}, {precision}: layers without torch's variable-length attention"
            checks.append(Check(name, packed.layers - packed.varlen, 0))
    return _checked(checks + ([*_check_sums(ids, mask)] if precision == "bfloat16" else []))


def _check_sums(ids: torch.Tensor, mask: torch.Tensor) -> Iterator[Check]:
    """Check the gradients of shared keys: summed in float32, and equal in every run."""
    layout = prefix_sharing_layout(ids, mask)
    index: Any = layout.key_index
    torch.manual_seed(0)
    upstream = torch.randn(index.numel(), 2, 64, device="cuda").bfloat16()
    zeros = torch.zeros(layout.packed_tokens, 2, 64, device="cuda", dtype=torch.float64)
    exact = zeros.index_add(0, index, upstream.double())
    order, offsets = layout.key_sort_order
    first = sum_by_token(upstream, order, offsets)
    shifted = sum_by_token(upstream, order.roll(1), offsets)  # each gradient is added to the neighbor of its key
    error, control = (((x.double() - exact).norm() / exact.norm()).item() for x in (first, shifted))
    yield Check("gradients of shared keys in bfloat16: distance from their sum", error, 2e-3, control)
    changed_runs = sum(not torch.equal(sum_by_token(upstream, order, offsets), first) for _ in range(10))
    yield Check("runs, of ten, in which the gradients of shared keys differ", changed_runs, 0)


@dataclass
class _Figures:
    """Log-probabilities `(B, L - 1)` and flat gradient of a step, its layers, and calls of torch's varlen op."""

    logps: torch.Tensor
    gradient: torch.Tensor
    layers: int
    varlen: int

    @classmethod
    def of(
        cls, model: Any, ids: torch.Tensor, mask: torch.Tensor, precision: str = "float32", mode: str | None = None
    ) -> _Figures:
        calls = mock.Mock(side_effect=attention.torch_varlen)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(attention, "torch_varlen", calls))
            if mode in ("padding-free", "prefix sharing"):
                stack.enter_context(remove_padding(model, prefix_sharing=mode == "prefix sharing"))
            # "leaking": all rows as one, so that each attends to those before it.
            shape = (1, -1) if mode == "leaking" else ids.shape
            logps = _logps(model, ids.reshape(shape), mask.reshape(shape), precision, ids)
            logps = logps * (mask[:, 1:] * mask[:, :-1])
            # Another weight for each token: errors of two tokens cannot cancel in the gradient.
            (logps * torch.linspace(-1, 1, logps.numel(), device=ids.device).view_as(logps)).sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        return cls(logps.detach(), gradient, model.config.num_hidden_layers, calls.call_count)

    def distance(self, exact: _Figures) -> float:
        """Larger of the relative differences of log-probabilities and gradients."""
        pairs = ((self.logps, exact.logps), (self.gradient, exact.gradient))
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def _logps(model: Any, ids: torch.Tensor, mask: torch.Tensor, precision: str, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next tokens of `rows`, which the model gets as `ids` and `mask`."""
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    return logits.reshape(*rows.shape, -1)[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None]).squeeze(2)


def _model(toy: bool, precision: str = "float32") -> Any:
    sizes = (64, 96, 2) if toy else (256, 512, 4)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config: Any = Qwen2Config(**dict(zip(names, sizes, strict=True)), **heads, vocab_size=512, initializer_range=0.08)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")
    if precision == "bfloat16":  # as `from_pretrained` does: the frequencies of rotary embeddings stay in float32
        frequencies = model.model.rotary_emb.inv_freq.clone()
        model.bfloat16().model.rotary_emb.inv_freq = frequencies
    return _placed(model, toy)


def _placed(x: Any, toy: bool) -> Any:
    """A tensor or a module on the GPU, or on the simulated one."""
    return importlib.import_module("simulated_gpu.simulated_cuda").to_simulated(x) if toy else x.to("cuda")


def _pairs(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows: row `i + rows / 2` shares half of its columns with row `i`, and all rows share a sixth."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 512, (rows, columns), generator=draw)
    ids[rows // 2 :, : columns // 2] = ids[: rows // 2, : columns // 2]
    ids[:, : columns // 6] = ids[0, : columns // 6]
    lengths = torch.randint(columns // 2 + 2, columns, (rows, 1), generator=draw)
    lengths[0] = columns  # the longest row: no column is empty
    mask = (torch.arange(columns) < lengths).long()
    return ids, mask


# -- the bits of a row


def compare_bits(precision: str, seconds: float = 0, *, toy: bool = False) -> dict[str, Any]:
    """Count the rows of a batch whose log-probabilities have the bits of the row alone, for each way to compute it."""
    ids, mask = (_placed(x, toy) for x in _pairs(rows=8, columns=24 if toy else 700))
    model, lengths = _model(toy, precision).eval(), mask.sum(1).tolist()
    ways: dict[str, dict[str, Any] | None] = {"padded": None}
    for multiple, sharing in product((None, 64), (False, True)):
        name = "shared" if sharing else "packed"
        options = {"prefix_sharing": sharing, "packed_multiple_of": multiple}
        ways[f"{name}, packed_multiple_of={multiple}" if multiple else name] = options

    @torch.no_grad()
    def rows_of(options: dict[str, Any] | None, *, alone: bool) -> list[torch.Tensor]:
        with contextlib.nullcontext() if options is None else remove_padding(model, **options):
            if alone:
                rows = [(ids[i : i + 1, :n], mask[i : i + 1, :n]) for i, n in enumerate(lengths)]
                return [_logps(model, *row, precision, row[0])[0] for row in rows]
            found = _logps(model, ids, mask, precision, ids)
        return [found[i, : n - 1] for i, n in enumerate(lengths)]

    bits, by_model = {}, rows_of(None, alone=True)
    for name, options in ways.items():
        found, alone = rows_of(options, alone=False), rows_of(options, alone=True)
        same = [sum(map(torch.equal, found, rows)) for rows in (by_model, alone)]
        bits[name] = {"of_model_alone": same[0], "of_same_way_alone": same[1], "rows": len(lengths)}
    return {"status": "measured", "bits": bits}


# -- times of steps


UNCOMPILED = ("trl", "padding_free", "prefix_sharing")

TIMES: tuple[tuple[Any, ...], ...] = (
    # trainer, shape, dtype, pairs, seconds, others
    ("dpo", "0.5b", "autocast", 8, 40, {}),
    ("dpo", "0.5b", "autocast", 64, 50, {"gradient_checkpointing": True}),
    ("sft", "0.5b", "autocast", 16, 30, {}),
    ("grpo", "0.5b", "autocast", 8, 35, {}),
    ("dpo", "0.5b", "bfloat16", 1, 20, {}),  # small batches, whose time is the host's
    ("sft", "0.5b", "bfloat16", 2, 20, {}),
    ("dpo", "7b", "bfloat16", 8, 50, {"lora": 16}),
    ("sft", "7b", "bfloat16", 16, 50, {"lora": 16, "gradient_checkpointing": True}),
    ("grpo", "7b", "bfloat16", 8, 60, {"lora": 16, "gradient_checkpointing": True}),
    ("dpo", "7b", "bfloat16", 64, 80, {"lora": 16, "gradient_checkpointing": True}),
    ("dpo", "0.5b", "autocast", 8, 80, {"variants": (*UNCOMPILED, "prefix_sharing_compiled")}),
)
"""Steps in the order of their importance."""


def _times(
    trainer: str, shape: str, dtype: str, pairs: int, seconds: float, others: dict[str, Any], *, toy: bool,
    data: str | None,
) -> Cell:  # fmt: skip
    sizes = dict(prompt_length=512, completion_length=128, steps=6, warmup=2, max_length=8192)
    settings = Settings(trainer=trainer, shape=shape, dtype=dtype, pairs=pairs, device="cuda", **sizes, **others)
    words = [trainer.upper(), shape.upper(), "LoRA" if settings.lora else "", settings.batch_size]
    compiled = any(VARIANTS[name].compiled for name in settings.variants)
    details = [dtype, *(["checkpointing"] * settings.gradient_checkpointing), *(["compiled"] * compiled)]
    name, device = f"{' '.join(filter(None, words))}, {', '.join(details)}", "cuda"
    if toy:
        device = "cpu" if compiled else "simulated"  # nothing is compiled for the simulated GPU
        settings = replace(
            settings, pairs=min(pairs, 2), generations=2, prompt_length=12, completion_length=6, steps=1, warmup=0,
            shape="tiny", lora=min(settings.lora, 2), max_length=64, compile_backend="aot_eager",
            device="cpu" if compiled else "cuda", memory=not compiled,
        )  # fmt: skip
    lengths = "lengths:12/6/0.75" if toy else "lengths:192/128/0.75"  # about as long as chat data
    source = None if trainer == "grpo" else data or lengths
    return Cell(name, partial(time_steps, settings, source, toy=toy), seconds, device)


def time_steps(settings: Settings, data: str | None, seconds: float, *, toy: bool = False) -> dict[str, Any]:
    """Time the variants of a step in turns; on a slow device fewer steps are counted."""
    deadline = time.monotonic() + 0.7 * seconds
    if settings.lora and find_spec("peft") is None:
        raise NotInstalledError("peft is not installed")
    at_first = replace(settings, device="cpu") if toy else settings
    rows, name = select_rows(data, at_first)
    step, counts = prepare(rows, at_first), None
    if toy and settings.device == "cuda":
        from simulated_gpu.simulated_cuda import current_counts
        from simulated_gpu.simulated_steps import on_simulated, place_models

        place_models(step.trainer)
        # The optimizer has the parameters of before.
        step.trainer.optimizer.param_groups[0]["params"] = [
            p for p in step.trainer.model.parameters() if p.requires_grad
        ]
        step.settings, step.to_device, counts = settings, on_simulated, current_counts()  # type: ignore[method-assign]
    entry = {"status": "measured", "settings": asdict(settings), "data": name}
    try:
        results = [asdict(result) for result in measure(step, deadline)]
    except TimeoutError:
        return entry | {"status": "not measured: out of time"}
    if settings.device == "cuda":
        flops = 0.0
        for result in results:
            counted = count_step(step, VARIANTS[result["name"]], counts)
            flops = counted.pop("flops") or flops  # compiled layers compute what layers compute
            peak = PEAKS.get(_short_name(torch.cuda.get_device_name()))
            seconds_of_step = result["total_seconds"] / result["steps"]
            mfu = None if peak is None or settings.dtype == "float32" else flops / seconds_of_step / (peak * 1e12)
            result |= counted | {"tflop": flops / 1e12, "mfu": mfu}
    return entry | {"variants": results}


PEAKS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250, "L40S": 362, "MI300X": 1307}
"""TFLOP/s of dense matrix products in bfloat16, by the data sheets of the vendors."""


def _short_name(name: str) -> str:
    """The name in [`PEAKS`] for one of torch's, such as "NVIDIA A100-SXM4-80GB"; "RTX A1000" is no "A100"."""
    return next((short for short in PEAKS if short in name.split("-")[0].upper().split()), name)


class FlopCounter(TorchDispatchMode):
    """Sums the floating-point operations of matrix products and of attention within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0.0
        self.launches: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        backward = "backward" in name
        # Forward: 2 products (QK, PV) of 2 flops per pair and channel. Backward: 5 products.
        factor = 10 if backward else 4
        if name.startswith("_flash_attention"):
            query, ends = (args[1], args[6:8]) if backward else (args[0], args[3:5])
            self.launches.append((*ends, factor * query.shape[1] * query.shape[2]))
        elif name.startswith("_scaled_dot_product"):
            query, key = args[1:3] if backward else args[:2]
            self.products += factor * query.numel() * key.shape[-2]
        elif name.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
            left, right = args[1:3] if "add" in name else args[:2]
            self.products += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> float:
        """Read after the block: it waits for the device."""
        total = self.products
        for *ends, factor in self.launches:
            lengths = zip(*(side.diff().tolist() for side in ends), strict=True)
            # Causal, aligned at the end: q queries attend to k - q + 1, ..., k keys.
            total += factor * sum(q * k - q * (q - 1) / 2 for q, k in lengths)
        return total


def count_step(step: BenchStep, variant: Variant, counts: Any = None) -> dict[str, Any]:
    """Count launches, waits of the host and FLOPs of a step, optimizer left out; `counts` of a simulated GPU."""
    batch = step.to_device(step.collate(list(range(step.settings.batch_rows))))
    flops = FlopCounter()
    counting = contextlib.nullcontext() if variant.compiled else flops  # layers under a mode are not compiled
    if counts is not None:
        counts.reset()
        with attached(step, variant), counting:
            step.forward_and_backward(batch)
        found = (counts.launches, counts.synchronisations.total(), counts.ours().total())
    else:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with (
            attached(step, variant),
            warnings.catch_warnings(record=True) as caught,
            profiled(activities=activities) as profile,
            counting,
        ):
            warnings.simplefilter("always")  # by default a warning of the same line is recorded once
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step.forward_and_backward(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        names = [event.name() for event in profile.profiler.kineto_results.events()]
        waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
        own = [w for w in waits if w.filename.startswith(str(Path(trl_padfix.__file__).parent))]
        launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
        found = (launches, len(waits), len(own))
    step.trainer.optimizer.zero_grad()
    return dict(zip(("launches", "waits", "own_waits"), found, strict=True)) | {"flops": flops.total}
