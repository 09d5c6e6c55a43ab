"""The checks for GPUs compare what they say: the same check on a simulated one, and what it notices."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_gpu.gpu_runs import check_half_precision
from simulated_gpu.simulated_cuda import to_simulated

import trl_padfix.core.attention.attention as attention


TINY = {"columns": 56, "hidden_size": 32, "intermediate_size": 48, "layers": 2}


def check(autocast: bool = True) -> None:
    settings: dict[str, Any] = {"implementation": "sdpa", "window": None, "sharing": True}
    check_half_precision(to_simulated, autocast=autocast, **settings, **TINY)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "fp32 under autocast"])
def test_the_test_for_gpus_passes_on_the_simulated_one(autocast, gpu):
    check(autocast)


def test_attention_that_is_not_varlen_is_noticed(gpu, monkeypatch):
    monkeypatch.setattr(attention, "torch_varlen_applies", lambda *args: False)
    with pytest.raises(AssertionError, match="0 layers ran"):
        check()
