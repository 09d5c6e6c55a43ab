"""Unpacking makes one padded tensor, and keeps gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from kit.gpu_models import pairs, rows
from kit.simulated_cuda import to_simulated

from trl_padfix import pack, padding_free_layout, prefix_sharing_layout, unpack


def test_unpacking_makes_one_padded_tensor(gpu):
    layout = padding_free_layout(to_simulated(pairs(8)[1]))
    states = to_simulated(torch.randn(1, layout.packed_tokens, 16))
    gpu.reset()
    unpack(states, layout)
    assert gpu.kernels == Counter({"new_zeros": 1, "index_copy_": 1})


def test_unpacking_in_place_keeps_gradients():
    layout = prefix_sharing_layout(*pairs(8))
    states = torch.randn(1, layout.packed_tokens, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack(x, layout), states, fast_mode=True)


def unpacking_copies_no_batch(gpu, unpack) -> None:
    _, mask = rows()
    layout = padding_free_layout(mask)
    states = pack(to_simulated(torch.randn(*mask.shape, 16)), layout)
    gpu.reset()
    unpack(states, layout)
    assert dict(gpu.kernels) == {"new_zeros": 1, "index_copy_": 1}


def test_a_second_padded_tensor_is_noticed(gpu):
    def out_of_place(x: torch.Tensor, layout: Any) -> torch.Tensor:
        zeros = x.new_zeros(layout.padded_tokens, *x.shape[2:])
        return zeros.index_copy(0, layout.real_index, x[0]).unflatten(0, layout.batch_shape)

    unpacking_copies_no_batch(gpu, unpack)
    with pytest.raises(AssertionError):
        unpacking_copies_no_batch(gpu, out_of_place)
