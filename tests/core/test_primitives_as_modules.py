"""Functions of transformers as the package `kernels` leaves them where it is installed: modules that call them."""

from __future__ import annotations

import inspect
import sys

import pytest
from torch import nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next as modeling
from zoo.families import build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core.model.inspection import kernel_parameters


kernels = pytest.importorskip("kernels.layer.layer")
RULE = "torch_chunk_gated_delta_rule"


def chunk_gated_delta_rule(q, k, v, g=None, beta=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    raise AssertionError("never called")


@pytest.fixture
def rule(monkeypatch) -> nn.Module:
    """The delta rule with a kernel that takes bounds, in the module of `kernels`."""
    package = type(sys)("kernel_stand_in")
    package.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "kernel_stand_in", package)
    in_torch = inspect.unwrap(getattr(modeling, RULE))
    own = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "kernel_stand_in", "")(in_torch)
    while isinstance(own, nn.Module):  # transformers has decorated it
        own = inspect.getclosurevars(type(own).forward).nonlocals["func"]
    assert "cu_seqlens" in kernel_parameters(own)
    return kernels.use_kernel_forward_from_hub(RULE)(own)


def test_the_arguments_of_a_kernel_are_read_through_its_module(rule):
    assert "cu_seqlens" in kernel_parameters(rule)
    in_torch = inspect.unwrap(getattr(modeling, RULE))
    assert kernel_parameters(kernels.use_kernel_forward_from_hub(RULE)(in_torch)) == set()


def of_the_hub(self, q, k, v, g, beta, initial_state=None, output_final_state=False, seq_bounds=None):
    raise AssertionError("never called")


@pytest.mark.parametrize("signature", [None, inspect.signature(of_the_hub)])
def test_arguments_that_cannot_be_read_are_an_error_before_the_first_step(signature, monkeypatch):
    """Nor does it help that a signature is claimed, as `kernels` does for the function that a module calls."""
    model = build("qwen3_next")
    hidden = nn.Identity()
    hidden.forward = lambda *args, **kwargs: None
    hidden.forward.__signature__ = signature
    monkeypatch.setattr(modeling, RULE, hidden)
    with pytest.raises(PaddingRemovalError, match=r"cannot be read.*USE_HUB_KERNELS=NO"):
        remove_padding(model)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
