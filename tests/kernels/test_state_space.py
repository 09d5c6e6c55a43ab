"""mamba_ssm's chunk scan against transformers' function in torch, with step sizes made before it, as we call it."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from kit.cells import slow_but


pytest.importorskip("triton")
pytest.importorskip("mamba_ssm")

from simulated_gpu.interpreted import counted_kernels, worst_of_all
from transformers.models.mamba2 import modeling_mamba2 as modeling

from trl_padfix.core.model.inspection import kernel_parameters


pytestmark = pytest.mark.kernels

TOLERANCE = {torch.float32: 2e-5} | {half: torch.finfo(half).eps for half in (torch.float16, torch.bfloat16)}
"""Relative. In half precision two roundings: of what the kernels multiply, and of what they return."""
HEADS, SIZE, STATE, GROUPS = 4, 8, 16, 2
WAYS = ("rows", "states", "segments")
CHUNK = 8


def differences(dtype: torch.dtype, way: str, tokens: int, off: int = 0) -> float:
    """
    The worst of output, final state and gradients: rows alone, rows from states to states, or segments of one row,
    given by `seq_idx` (`off` moves their border).
    """
    torch.manual_seed(0)
    rows = 1 if way == "segments" else 2
    drawn = [torch.randn(rows, tokens, HEADS, SIZE), *torch.randn(2, rows, tokens, GROUPS, STATE)]
    others = [torch.rand(rows, tokens, HEADS) + 0.1, -torch.rand(HEADS) - 0.1, torch.rand(HEADS)]
    if way == "states":
        others.append(torch.randn(rows, HEADS, SIZE, STATE))
    given = [x.to(dtype).requires_grad_() for x in drawn] + [x.clone().requires_grad_() for x in others]
    exact = [x.detach().float().requires_grad_() for x in given]
    lengths = [3, tokens - 3] if way == "segments" else [tokens]

    def run(scan, values, **more):
        x, b, c, dt, a, d, *state = values
        if state:
            more |= {"initial_states": state[0], "return_final_states": True}
        out = scan(x, dt, a, b, c, chunk_size=CHUNK, D=d, **more)
        return out if state else (out,)

    parts = zip(*(exact[i].split(lengths, 1) for i in range(4)), strict=True)
    segments = [run(inspect.unwrap(modeling.mamba2_chunk_scan), [*part, *exact[4:]]) for part in parts]
    wanted = torch.cat([segment[0] for segment in segments], 1), *segments[-1][1:]
    places = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].roll(off, 1)
    with counted_kernels() as launches:
        got = run(modeling.mamba2_chunk_scan, given, **({"seq_idx": places.int()} if way == "segments" else {}))
        error = worst_of_all(got, wanted, given, exact)
    assert sum(launches.values()) >= 8
    return error


CELLS = itertools.product(TOLERANCE, WAYS, (10, 16, 3))


@pytest.mark.parametrize(
    ("dtype", "way", "tokens"),
    slow_but([(torch.float32, "segments", 10), (torch.float32, "states", 10)], CELLS),
    ids=str,
)
def test_rows_and_segments_are_computed_alone(dtype, way, tokens):
    if way == "segments" and tokens == 3:
        pytest.skip("there is but one segment")
    assert differences(dtype, way, tokens) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", slow_but([torch.float32], TOLERANCE), ids=str)
def test_segments_that_begin_elsewhere_would_be_seen(dtype):
    assert differences(dtype, "segments", 10, off=1) > 0.1


def test_what_the_kernel_takes_is_read():
    assert {"seq_idx", "initial_states", "return_final_states"} <= kernel_parameters(modeling.mamba2_chunk_scan)
