"""The gradients of keys that rows share are one sum, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu.simulated_cuda import to_simulated
from zoo.gpu_models import pairs

import trl_padfix.core.attention.segments as segments
from trl_padfix import prefix_sharing_layout


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_gradients_of_shared_keys_are_one_sum_in_float32():
    layout = prefix_sharing_layout(*pairs(512, everyone=8))
    upstream = torch.randn(layout.key_index.numel(), 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.zeros(layout.packed_tokens, 2, 16, dtype=torch.float64)
    exact.index_add_(0, layout.key_index, upstream.double())

    ours = segments.sum_by_token(upstream, *layout.key_sort_order)
    assert relative_error(ours, exact) <= 1.7e-3
    assert all(torch.equal(segments.sum_by_token(upstream, *layout.key_sort_order), ours) for _ in range(3))

    running = torch.zeros_like(exact, dtype=torch.bfloat16)  # a sum that is rounded after every addition
    for token, row in zip(layout.key_index.tolist(), upstream, strict=True):
        running[token] += row
    assert relative_error(running, exact) > 1e-2


def test_the_sum_is_that_of_every_place():
    layout = prefix_sharing_layout(*pairs(16))
    upstream = torch.randn(layout.key_index.numel(), 2, 4, dtype=torch.float64)
    want = torch.zeros(layout.packed_tokens, 2, 4, dtype=torch.float64).index_add_(0, layout.key_index, upstream)
    torch.testing.assert_close(segments.sum_by_token(upstream, *layout.key_sort_order), want)
    order, offsets = layout.key_sort_order
    assert not torch.allclose(segments.sum_by_token(upstream, order.roll(1), offsets), want)


def shared_gradients_are_one_sum(gpu) -> None:
    layout = prefix_sharing_layout(*map(to_simulated, pairs(8)))
    draw = torch.Generator().manual_seed(0)
    states = to_simulated(torch.randn(1, 2, layout.packed_tokens, 16, generator=draw).bfloat16()).requires_grad_()
    upstream = torch.randn(1, 2, layout.gathered_keys, 16, generator=draw).bfloat16()
    gathered = segments.gather_keys(states, layout)
    gpu.reset()
    (found,) = torch.autograd.grad(gathered, states, to_simulated(upstream))
    assert gpu.launches <= 4
    exact = torch.zeros(layout.packed_tokens, 2, 16, dtype=torch.float64)
    assert layout.key_index is not None
    exact.index_add_(0, layout.key_index.cpu(), upstream[0].transpose(0, 1).double())
    assert (found.cpu()[0].transpose(0, 1).double() - exact).norm() / exact.norm() <= 1.7e-3


def one_addition_for_each_segment(upstream: torch.Tensor, *_: Any) -> torch.Tensor:
    layout: Any = prefix_sharing_layout(*map(to_simulated, pairs(8)))
    total, begin = upstream.new_zeros(layout.packed_tokens, *upstream.shape[1:]), 0
    for length in layout.key_lengths:
        part = slice(begin, begin + length)
        total.index_add_(0, layout.key_index[part], upstream[part])
        begin += length
    return total


def test_a_backward_that_adds_segment_by_segment_is_noticed(gpu, monkeypatch):
    shared_gradients_are_one_sum(gpu)
    monkeypatch.setattr(segments, "sum_by_token", one_addition_for_each_segment)
    with pytest.raises(AssertionError):
        shared_gradients_are_one_sum(gpu)
