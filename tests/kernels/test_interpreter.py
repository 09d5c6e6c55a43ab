"""The interpreter computes what a compiled kernel does, bfloat16 above all."""

from __future__ import annotations

import pytest
import torch


pytest.importorskip("triton")

import triton
import triton.language as tl
from simulated_gpu.interpreted import counted_kernels
from triton.language.extra import libdevice
from triton.runtime import interpreter


pytestmark = pytest.mark.kernels


@triton.jit
def arithmetic(a_ptr, b_ptr, out_ptr, scale, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(out_ptr + at, (a + b) * b)
    tl.store(out_ptr + N + at, tl.where(a < b, a, b))
    tl.store(out_ptr + 2 * N + at, tl.zeros([N], tl.float32) + tl.sum(a, 0) + tl.max(b, 0))
    tl.store(out_ptr + 3 * N + at, libdevice.tanh(a.to(tl.float32)) * scale.to(tl.float32))
    total = tl.zeros([N], tl.float32)
    for i in range(3):
        total += a * i.to(tl.float32)
    tl.store(out_ptr + 4 * N + at, total)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def errors(dtype: torch.dtype) -> float:
    a, b = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty(5, 16)
    m, n = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    outer = torch.empty(16, 16)
    with counted_kernels() as launches:
        arithmetic[(1,)](a, b, out, 0.5, N=16)
        product[(1,)](m, n, outer, N=16)
    assert launches == {"arithmetic": 1, "product": 1}
    x, y = a.float(), b.float()
    wanted = [(a + b) * b, torch.minimum(a, b), (x.sum() + y.max()).expand(16), x.tanh() * 0.5, 3 * x]
    wanted = torch.stack([w.float() for w in wanted])
    return max((out - wanted).abs().max().item(), (outer - m.float() @ n.float()).abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_kernel_computes_what_torch_does(dtype):
    assert errors(dtype) < (1e-5 if dtype == torch.float32 else 5e-3)  # sums of halves are rounded


def test_bfloat16_by_its_bits_would_be_seen(monkeypatch):
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "binary_op",
        interpreter.InterpreterBuilder.binary_op.__closure__[0].cell_contents,
    )
    assert not errors(torch.bfloat16) < 1
