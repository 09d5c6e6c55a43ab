"""
Hybrid models with the kernels of their recurrences: padded, packed, and forked where rows part.

The reference is the padded model with transformers' functions in torch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from kit.cells import slow_but
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from zoo import family_outcomes
from zoo.families import build, build_type
from zoo.family_outcomes import (
    LEAK,
    batched,
    gradient_difference,
    gradients_of,
    leaking_layouts,
    rows,
    trees_without_parents,
    weighted,
)


pytest.importorskip("triton")

from simulated_gpu.interpreted import counted_kernels

from trl_padfix import remove_padding
from trl_padfix.core.model.inspection import kernel_parameters


pytestmark = pytest.mark.kernels

TOLERANCE = 4e-4
"""How far weights one rounding away move log-probabilities of a delta net; a leak moves them 25 times as far."""

PACKAGES = {
    "qwen3_next": "fla", "qwen3_5_text": "fla", "olmo_hybrid": "fla", "kimi_linear": "fla",
    "mamba2": "mamba_ssm", "granitemoehybrid": "mamba_ssm",
}  # fmt: skip
SMALL = {
    "mamba2": {"hidden_size": 16, "num_heads": 4, "num_hidden_layers": 1},
    "granitemoehybrid": {"hidden_size": 16, "mamba_n_heads": 4, "layer_types": ["mamba", "attention"]},
}
"""A program of a kernel for each head and chunk: fewer of them are as good."""
MODES = {"padded": None, "packed": False, "forked": True}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    few = [row[:11] for row in rows()[:3]]
    monkeypatch.setattr(family_outcomes, "rows", lambda: few)


def make(family: str) -> Any:
    pytest.importorskip(PACKAGES[family])
    # `fla` registers models of its own under names of transformers', Mamba 2 among them.
    registered = CONFIG_MAPPING._extra_content, AutoModelForCausalLM._model_mapping._extra_content
    with mock.patch.dict(registered[0], clear=True), mock.patch.dict(registered[1], clear=True):
        return build_type(family, SMALL[family]) if family in SMALL else build(family)


def in_torch(model: Any) -> Any:
    """Until the block ends, the functions that found a kernel are transformers' own."""
    space, own = vars(sys.modules[type(model).__module__]), {}
    for name, value in space.items():
        if inspect.isfunction(value) and inspect.getclosurevars(value).nonlocals.get("is_new_implementation"):
            own[name] = inspect.unwrap(value)
    assert own, "no kernel was found"
    return mock.patch.dict(space, own)


def scores(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logps = batched(model, "right")
    return logps.detach(), gradients_of(model, weighted(logps))


@functools.cache
def reference(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = make(family)
    with in_torch(model), counted_kernels() as launches:
        found = scores(model)
    assert not launches
    return found


def differences(family: str, mode: str) -> tuple[float, float, int]:
    """Of log-probabilities and of gradients; and kernels that were launched."""
    model, (logps, gradients) = make(family), reference(family)
    removal = nullcontext() if mode == "padded" else remove_padding(model, prefix_sharing=MODES[mode])
    with counted_kernels() as launches, removal:
        launches.clear()  # attaching may run the model on four tokens
        got = scores(model)
    return (got[0] - logps).abs().max().item(), gradient_difference(got[1], gradients), sum(launches.values())


FAST = [("qwen3_next", "packed"), ("qwen3_next", "forked"), ("mamba2", "packed")]


@pytest.mark.parametrize(("family", "mode"), slow_but(FAST, itertools.product(PACKAGES, MODES)))
def test_kernels_give_what_the_padded_model_gives_in_torch(family, mode):
    logp, gradient, launches = differences(family, mode)
    assert logp <= TOLERANCE
    assert gradient <= TOLERANCE
    assert launches > 8


@pytest.mark.parametrize("family", slow_but(["qwen3_next"], PACKAGES))
def test_rows_that_run_into_each_other_and_states_that_do_not_fork_would_be_seen(family):
    with leaking_layouts():
        assert differences(family, "packed")[0] >= LEAK
    with trees_without_parents():
        assert differences(family, "forked")[0] >= LEAK


def test_what_a_kernel_takes_is_read():
    """Of transformers' function, and of the kernel where the Hub hands it over by itself."""
    for package in PACKAGES.values():
        pytest.importorskip(package)
    for rule in (qwen3_next.torch_chunk_gated_delta_rule, kimi_linear.chunk_kimi_delta_attention):
        kernel = inspect.getclosurevars(rule).nonlocals["implementation"]
        for function in (rule, kernel):
            assert {"cu_seqlens", "initial_state", "output_final_state"} <= kernel_parameters(function)
    taken = kernel_parameters(mamba2.mamba2_chunk_scan)
    assert {"seq_idx", "initial_states", "return_final_states"} <= taken
