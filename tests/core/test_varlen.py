"""
torch's variable-length kernel on a simulated GPU, with real numbers: what reaches it, in how many kernels, and what is
said of what does not.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from simulated_gpu.simulated_cuda import to_simulated
from zoo.gpu_models import build, pairs, step

import trl_padfix.core.attention.attention as attention
import trl_padfix.core.attention.varlen as kernels
from trl_padfix import PaddingRemovalError, padding_free_layout, remove_padding


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


VERSIONS = [
    ({"scale", "window_size", "enable_gqa"}, True, {"enable_gqa": True}),  # 2.12 and later
    ({"scale", "window_size"}, True, {}),  # 2.11 groups heads by itself
    ({"is_causal"}, False, None),  # 2.10
    (set(), False, None),  # 2.9 has none
]


def test_torch_2_11_and_later_have_what_it_takes(gpu, monkeypatch):
    calls = []

    def varlen_attn(query, key, value, *bounds, **kwargs):
        calls.append(kwargs)
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    layout = padding_free_layout(torch.ones(1, 3, dtype=torch.int64))
    states = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 2, 8)
    for parameters, complete, given in VERSIONS:
        monkeypatch.setattr(kernels, "_varlen_parameters", lambda found=parameters: frozenset(found))
        kernels.torch_varlen_is_complete.cache_clear()
        assert kernels.torch_varlen_is_complete() is complete
        if complete:
            kernels.attend_torch_varlen(*states, layout, {"scaling": 0.5})
            assert {k: v for k, v in calls[-1].items() if k == "enable_gqa"} == given


# -- what does not run on the fast kernel says so


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"head_dim": 12}, "multiples of 8, and this model's have 12"),
        ({"head_dim": 264}, "at most 256 dimensions"),
        ({"attention_dropout": 0.1}, "set `attention_dropout=0`"),
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
    said = [r.getMessage() for r in caplog.records if "segment by segment" in r.getMessage()]
    assert len(said) == 1
    assert reason in said[0]
    assert gpu.varlen == []


# -- errors keep their names


def raised(error: Exception, autocast: bool, package: str = "transformers") -> Exception:
    """What is raised where an attention function of a package raises an error."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        raise error

    attend.__module__ = package
    layout = padding_free_layout(to_simulated(torch.ones(1, 3, dtype=torch.int64)))
    states = [to_simulated(torch.zeros(1, 2, 3, 8)) for _ in range(3)]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast), pytest.raises(Exception) as caught:  # noqa: PT011
        kernels.attend_varlen(attend, torch.nn.Module(), *states, layout, {})
    return caught.value


ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory"), False, torch.OutOfMemoryError),
    (torch.OutOfMemoryError("CUDA out of memory"), True, torch.OutOfMemoryError),
    (RuntimeError("an illegal memory access"), True, RuntimeError),
    (RuntimeError("FlashAttention only support fp16 and bf16"), False, PaddingRemovalError),
]


def test_an_error_of_flash_attention_keeps_its_name(gpu):
    for error, autocast, expected in ERRORS:
        found = raised(error, autocast)
        assert type(found) is expected
        assert expected is not PaddingRemovalError or "bfloat16" in str(found)  # the remedy
    assert type(raised(RuntimeError("of a user's function"), False, "own")) is RuntimeError
