"""Where the bits of a row are promised, and the tests that need the promise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from trl_padfix.core.attention import segments


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


def with_calls_of_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of a CPU's kernel for each segment, with the keys of the segment only."""
    calls = segments._calls

    def cut(*args: Any) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        for q, k, mask in calls(*args):
            yield q, k, mask[..., : k.stop - k.start]

    monkeypatch.setattr(segments, "_calls", cut)
    monkeypatch.setattr(segments, "QUERIES_OF_CALL", 1024)
