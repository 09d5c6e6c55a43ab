"""
Variable-length attention kernels against attention written out: the questions that packed forwards ask of them.

On the CPU the references that the other tests compute with must answer; on a GPU (`pytest -m gpu`) whatever is
installed: torch's own, FlashAttention 2, 3 and 4, and Hub kernels that are in the cache. What a kernel has no argument
for is no case for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from kit.tolerance import tolerance
from simulated_gpu import reference_flash_attn, varlen_reference
from simulated_gpu.conformance import CASES, Case, bounds, conform, of_flash_attn

from trl_padfix.core.attention.attention import torch_varlen


def of_torch(states: list[torch.Tensor], case: Case, sinks: torch.Tensor | None) -> torch.Tensor:
    """torch's own kernel, as the package calls it."""
    ends = (bounds(lengths, str(states[0].device)) for lengths in (case.queries, case.keys))
    segments = *ends, max(case.queries), max(case.keys)
    return torch_varlen(*states, segments, case.asked.get("scale"), case.window)


of_torch.asked = {"scale"}


def of_torch_on_cpu() -> Callable:
    pytest.importorskip("torch.nn.attention.varlen")
    varlen_reference.on_cpu()
    return of_torch


def installed(module: str, name: str = "flash_attn_varlen_func") -> Callable:
    try:
        return of_flash_attn(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, OSError):
        pytest.skip(f"{module} is not installed")


def cached(repository: str) -> Callable:
    kernels = pytest.importorskip("kernels")
    try:
        return of_flash_attn(kernels.get_kernel(repository, local_files_only=True).flash_attn_varlen_func)
    except Exception as error:
        pytest.skip(f"{repository} cannot be loaded from the cache: {error}")


ON_CPU = {
    "the reference of flash-attn": lambda: of_flash_attn(reference_flash_attn.flash_attn_varlen_func),
    "the reference of torch's varlen": of_torch_on_cpu,
}
ON_GPU = {
    "torch": lambda: of_torch,
    "FlashAttention 2": lambda: installed("flash_attn"),
    "FlashAttention 3": lambda: installed("flash_attn_interface"),
    "FlashAttention 4": lambda: installed("flash_attn.cute"),
    "Hub, FlashAttention 2": lambda: cached("kernels-community/flash-attn2"),
    "Hub, FlashAttention 3": lambda: cached("kernels-community/vllm-flash-attn3"),
    "Hub, FlashAttention 4": lambda: cached("kernels-community/flash-attn4"),
}


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_reference_answers_as_attention_written_out(kernel):
    answer = ON_CPU[kernel]()
    for case in CASES.values():
        if case.asked.keys() <= answer.asked:
            conform(answer, case, "cpu", torch.float32, tolerance(1, terms=300, depth=4))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", ON_GPU)
def test_a_kernel_answers_as_attention_written_out(kernel, dtype, case):
    # Relative to the norm of all values: the roundings of weights, of states and of the output.
    conform(ON_GPU[kernel](), CASES[case], "cuda", dtype, 2 * torch.finfo(dtype).eps)
