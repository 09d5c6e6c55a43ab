"""
torch's variable-length kernel on a simulated GPU, with real numbers: what reaches it, in how many kernels, and what is
said of what does not.
"""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from simulated_gpu import varlen_reference
from simulated_gpu.simulated_cuda import to_simulated
from zoo.gpu_models import build, pairs, step

import trl_padfix.core.attention.attention as attention
import trl_padfix.core.attention.attention as kernels
from trl_padfix import remove_padding
from trl_padfix.core.model.inspection import parameters_of


# -- the precision that attention computes in


@pytest.mark.parametrize(
    ("dtype", "autocast", "sharing"), [(torch.float32, True, True), (torch.bfloat16, False, False)]
)
def test_every_layer_runs_on_torchs_varlen_kernel(gpu, dtype, autocast, sharing, monkeypatch):
    ids, mask = pairs(8)
    want = step(build(), ids, mask, autocast=False)
    simulated = to_simulated(ids), to_simulated(mask)
    padded = step(to_simulated(build(dtype=dtype)), *simulated, autocast=autocast)
    assert gpu.varlen == []
    model = to_simulated(build(dtype=dtype))
    with remove_padding(model, prefix_sharing=sharing):
        packed = step(model, *simulated, autocast=autocast)

    assert len(gpu.varlen) == model.config.num_hidden_layers
    for got, other, exact in zip(packed, padded, want, strict=True):
        assert (got - exact).norm() < 1.3 * (other - exact).norm()
    if autocast:  # the control: queries that stay in float32
        monkeypatch.setattr(attention, "in_attention_dtype", lambda *states: list(states))
        gpu.reset()
        with remove_padding(model, prefix_sharing=sharing):
            step(model, *simulated, autocast=autocast)
        assert gpu.varlen == []


# -- what the kernels are handed


def test_the_operator_gets_what_torchs_varlen_attn_gives_it():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    varlen_reference.on_cpu()
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 4, 8), (5, 2, 8), (5, 2, 8)
    query, key, value = (torch.randn(size, generator=generator, requires_grad=True) for size in sizes)
    ends = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    grouped = {"enable_gqa": True} if "enable_gqa" in parameters_of(varlen.varlen_attn) else {}
    seen = []
    for window in (None, 1):
        size = (-1 if window is None else window - 1, 0)
        of_torch = partial(varlen.varlen_attn, window_size=size, scale=0.5, **grouped)
        for attend in (of_torch, partial(_ours, window=window), partial(_ours, window=2)):
            torch.autograd.grad(attend(query, key, value, *ends, 2, 3).sum(), (query, key, value))
            seen.append([*varlen_reference.calls])  # forward and backward
    for expected, got, other in zip(seen[::3], seen[1::3], seen[2::3], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        with pytest.raises(AssertionError):  # another window is seen
            torch.testing.assert_close(other, expected, rtol=0, atol=0)


def _ours(query, key, value, *segments, window):
    return kernels.torch_varlen(query, key, value, segments, 0.5, window)


# -- what does not run on the fast kernel says so


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"head_dim": 12}, "heads of 12 and 12 dimensions"),
        ({"head_dim": 264}, "heads of 264 and 264 dimensions"),
        ({"attention_dropout": 0.1}, "a dropout of 0.1"),
    ],
    ids=["odd head size", "large heads", "dropout"],
)
def test_a_slow_path_in_half_precision_is_said_once(gpu, config, reason, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    kernels.logger.setLevel("WARNING")
    kernels.logger.warning_once.__func__.cache_clear()
    model = to_simulated(build(dtype=torch.bfloat16, **config)).train()
    with remove_padding(model):
        for _ in range(2):
            model(*(to_simulated(x) for x in pairs(4)), use_cache=False)
    said = [r.getMessage() for r in caplog.records if "One attention call per row" in r.getMessage()]
    assert len(said) == 1
    assert reason in said[0]
    assert gpu.varlen == []
