"""flash-attn's variable-length attention with its Triton kernels, which it has for AMD: what packed forwards ask."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from kit.cells import slow_but
from simulated_gpu.conformance import CASES, Case, conform, of_flash_attn


pytest.importorskip("triton")
if find_spec("flash_attn") is None:
    pytest.skip("flash-attn is not installed", allow_module_level=True)

from simulated_gpu.interpreted import counted_kernels, flash_attn


pytestmark = pytest.mark.kernels

SMALL = {
    "whole rows": {},
    "unequal lengths": {"queries": (5, 40, 1), "keys": (5, 70, 33)},
    "one query, many keys": {"keys": (70, 3)},
    "equal heads": {"queries": (5, 20), "keys": (5, 30)},
    "heads of 80": {"queries": (5, 20), "keys": (5, 30), "size": 40},
    "scale": {"queries": (5, 20), "keys": (5, 30)},
}
"""Cases of the table that this backend computes, in smaller sizes: the interpreter runs program after program."""


def answer(case: Case, dtype: torch.dtype, *, head_major: bool = False) -> None:
    kernel = of_flash_attn(flash_attn().flash_attn_varlen_func)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    with counted_kernels() as launches:
        conform(kernel, case, "cpu", dtype, tolerance, head_major=head_major)
    assert sum(launches.values()) >= 3


def small(name: str) -> Case:
    return replace(CASES[name], **{"size": 16, **SMALL[name]})


@pytest.mark.parametrize("case", slow_but(["unequal lengths"], SMALL))
@pytest.mark.parametrize("dtype", slow_but([torch.float32], [torch.float32, torch.float16, torch.bfloat16]), ids=str)
def test_it_answers_as_attention_written_out(dtype, case):
    answer(small(case), dtype)


# What is wrong in this backend: `strict`, so that the day is noticed on which it is mended.


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="they are ignored (ROCm/aiter#3742)")
@pytest.mark.parametrize("ignored", [{"window": 8}, {"asked": {"softcap": 5.0}}], ids=str)
def test_it_answers_with_a_window_and_with_a_softcap(ignored):
    answer(replace(small("unequal lengths"), **ignored), torch.float32)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="gradients of q and k assume rows of heads")
def test_it_answers_queries_that_lie_head_by_head():
    answer(small("unequal lengths"), torch.float32, head_major=True)
