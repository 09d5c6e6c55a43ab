"""flash-linear-attention's delta rules and convolution against transformers' functions in torch, by segments."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.cells import slow_but


pytest.importorskip("triton")
pytest.importorskip("fla")

from fla.modules.causal_conv1d import causal_conv1d
from simulated_gpu.interpreted import counted_kernels, worst, worst_of_all
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from trl_padfix.core.model.inspection import kernel_parameters


pytestmark = pytest.mark.kernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
RULES = {
    "gated delta rule": qwen.torch_chunk_gated_delta_rule,
    "Kimi's": kimi.chunk_kimi_delta_attention,
}
LENGTHS = {"longer than a chunk": [70, 3, 1], "shorter": [5, 20, 1], "one token": [1]}


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def draw(rule: str, lengths: list[int], dtype: torch.dtype, heads: tuple[int, int]) -> list[torch.Tensor]:
    """Queries, keys, values, decays and writes `(1, T, heads, size)`, and a state for each segment."""
    torch.manual_seed(0)
    tokens, (of_keys, of_values), size = sum(lengths), heads, 16
    q, k = torch.randn(2, 1, tokens, of_keys, size).to(dtype)
    v = torch.randn(1, tokens, of_values, size).to(dtype)
    decay = -torch.rand(1, tokens, of_values, *((size,) if rule == "Kimi's" else ())) * 0.3
    write = torch.rand(1, tokens, of_values).to(dtype)
    return [q, k, v, decay, write, torch.randn(len(lengths), of_values, size, size)]


def run(function: Callable, values: list[torch.Tensor], with_states: bool, **given: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, decay, write, state = values
    more = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, **given}
    return function(q, k, v, g=decay, beta=write, initial_state=state if with_states else None, **more)


def differences(rule: str, lengths: list[int], dtype: torch.dtype, with_states: bool, **wrong: Any) -> float:
    """The worst of outputs, final states, and the gradients of all inputs."""
    heads = (4, 4) if rule == "Kimi's" else (2, 4)
    given = [x.requires_grad_() for x in draw(rule, lengths, dtype, heads)]
    exact = [x.detach().float().requires_grad_() for x in given]
    given, exact = ((x if with_states else [*x[:-1], None]) for x in (given, exact))
    parts = zip(*(x.split(lengths, 1) for x in exact[:5]), strict=True)
    states = exact[5].split(1) if with_states else [None] * len(lengths)
    own = inspect.unwrap(RULES[rule])
    segments = [run(own, [*part, state], with_states) for part, state in zip(parts, states, strict=True)]
    wanted = torch.cat([segment[0] for segment in segments], 1), torch.cat([segment[1] for segment in segments])
    with counted_kernels() as launches:
        got = run(RULES[rule], given, with_states, **{"cu_seqlens": bounds(lengths), **wrong})
        error = worst_of_all(got, wanted, given[: 5 + with_states], exact[: 5 + with_states])
    assert sum(launches.values()) >= 8
    return error


FAST = [("gated delta rule", "shorter", torch.float32, True)]
CELLS = list(itertools.product(RULES, LENGTHS, DTYPES, (True, False)))


@pytest.mark.parametrize(("rule", "lengths", "dtype", "with_states"), slow_but(FAST, CELLS), ids=str)
def test_segments_are_computed_alone_from_their_states(rule, lengths, dtype, with_states):
    assert differences(rule, LENGTHS[lengths], dtype, with_states) < TOLERANCE[dtype]


@pytest.mark.parametrize("rule", slow_but(["gated delta rule"], RULES))
def test_a_segment_that_runs_into_the_next_would_be_seen(rule):
    assert differences(rule, [5, 20, 1], torch.float32, False, cu_seqlens=bounds([6, 19, 1])) > 0.1


@pytest.mark.parametrize("rule", RULES)
def test_what_a_kernel_takes_is_read(rule):
    """Of transformers' function, and of the kernel where the Hub hands it over by itself."""
    kernel = inspect.getclosurevars(RULES[rule]).nonlocals["implementation"]
    for function in (RULES[rule], kernel):
        assert {"cu_seqlens", "initial_state", "output_final_state"} <= kernel_parameters(function)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_recurrent_rule_of_decoding(dtype):
    values = draw("gated delta rule", [9], dtype, (2, 4))
    exact = [x.float() for x in values]
    step = qwen.torch_recurrent_gated_delta_rule
    with counted_kernels() as launches:
        got = run(step, values, True)
    assert launches
    wanted, other = (run(inspect.unwrap(step), exact, with_state) for with_state in (True, False))
    assert max(worst(a, b) for a, b in zip(got, wanted, strict=True)) < TOLERANCE[dtype]
    assert worst(got[0], other[0]) > 0.1


@pytest.mark.parametrize("dtype", slow_but([torch.float32], DTYPES), ids=str)
def test_the_convolution_keeps_segments_apart(dtype):
    """Transformers asks causal-conv1d for one, which needs CUDA; models of `fla` use this."""
    torch.manual_seed(0)
    lengths, x, weight = [5, 20, 1], torch.randn(1, 26, 16).to(dtype), torch.randn(16, 4).to(dtype)
    given, exact = x.clone().requires_grad_(), x.float().requires_grad_()
    own = inspect.unwrap(qwen.causal_conv1d_fn)

    def convolved(rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
        parts = [own(row.transpose(1, 2), weight.float(), activation="silu").transpose(1, 2) for row in rows]
        return torch.cat(parts, 1)

    wanted = convolved(exact.split(lengths, 1))
    with counted_kernels() as launches:
        out = causal_conv1d(given, weight, activation="silu", cu_seqlens=bounds(lengths))[0].view_as(wanted)
        assert worst_of_all([out], [wanted], [given], [exact]) < TOLERANCE[dtype]
    assert launches
    assert worst(out, convolved((exact,))) > 0.1
