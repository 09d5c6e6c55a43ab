"""Where the bits of a row are promised, and the tests that need the promise."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as functional


SIZE = 64
"""The hidden size of the models whose bits are compared; their intermediate size is twice as large."""


def products_have_one_order() -> bool:
    """Whether products of the sizes of the model and of its attention give a row the same bits in every batch."""
    draw = torch.Generator().manual_seed(0)
    for inputs, outputs in ((SIZE, SIZE), (SIZE, 2 * SIZE), (2 * SIZE, SIZE), (SIZE, 40), (16, 192), (192, 16)):
        weight = torch.randn(outputs, inputs, generator=draw)
        states = torch.randn(700, inputs, generator=draw)
        expected = functional.linear(states, weight)
        if not all(torch.equal(functional.linear(states[:n], weight), expected[:n]) for n in range(16, 700, 13)):
            return False
    return True


def skip_without_one_order() -> None:
    if torch.get_num_threads() > 1 and not os.environ.get("MKL_CBWR"):
        pytest.skip("with several threads MKL splits a product by its number of rows; try MKL_CBWR=AVX2,STRICT")
    if not products_have_one_order():
        pytest.skip("this machine's float32 products depend on their number of rows; try MKL_CBWR=AVX2,STRICT")
