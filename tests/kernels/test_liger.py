"""Models with Liger's layers and fused loss, padded and with padding removed, against the models in torch."""

from __future__ import annotations

import copy
import itertools
import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from kit.cells import slow_but
from zoo import family_outcomes
from zoo.families import build
from zoo.family_outcomes import LEAK, gradient_difference, gradients_of, leaking_layouts, padded, rows, weighted


pytest.importorskip("triton")
liger = pytest.importorskip("liger_kernel.transformers")

from simulated_gpu.interpreted import counted_kernels  # noqa: E402

from trl_padfix import remove_padding  # noqa: E402


pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),  # by Liger
]

TOLERANCE = 2e-5
MODES = {"padded": None, "packed": False, "shared": True}


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    few = rows()[:3]
    monkeypatch.setattr(family_outcomes, "rows", lambda: few)


def scores(model: Any, fused: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The model's loss, or the log-probabilities of its tokens; and the gradients."""
    if fused:
        ids, mask = padded("right")
        loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        return loss.detach(), gradients_of(model, loss)
    logps = family_outcomes.batched(model, "right")
    return logps.detach(), gradients_of(model, weighted(logps))


def differences(family: str, fused: bool, mode: str) -> tuple[float, float, Counter[str]]:
    """Of the loss or log-probabilities, and of gradients; and the kernels that were launched."""
    plain = build(family).train()
    model, space = copy.deepcopy(plain), vars(sys.modules[type(plain).__module__])
    expected = scores(plain, fused)

    def apply() -> None:
        liger._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=fused, cross_entropy=False)

    with mock.patch.dict(space), counted_kernels() as launches:  # Liger writes into `space`
        if mode != "shared":
            apply()
        with nullcontext() if mode == "padded" else remove_padding(model, prefix_sharing=MODES[mode]):
            if mode == "shared":  # then applied to a model that is attached
                apply()
            got = scores(model, fused)
    return (got[0] - expected[0]).abs().max().item(), gradient_difference(got[1], expected[1]), launches


FAST = [("qwen2", False, "packed"), ("qwen2", True, "shared"), ("qwen2", True, "packed"), ("gemma2", False, "packed")]
CELLS = itertools.product(("qwen2", "llama", "qwen3", "gemma2"), (False, True), MODES)


@pytest.mark.parametrize(("family", "fused", "mode"), slow_but(FAST, CELLS), ids=str)
def test_ligers_kernels_give_what_the_padded_model_gives_in_torch(family, fused, mode):
    value, gradient, launches = differences(family, fused, mode)
    assert max(value, gradient) <= TOLERANCE
    kernels = {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_triton_rope"}
    kernels |= {"_geglu_tanh_forward_kernel"} if family == "gemma2" else {"_swiglu_forward_kernel"}
    assert kernels | ({"liger_cross_entropy_kernel"} if fused else set()) <= launches.keys()


@pytest.mark.parametrize("mode", ["packed", "shared"])
def test_rows_that_run_into_each_other_would_be_seen(mode):
    with leaking_layouts():
        assert differences("qwen2", False, mode)[0] >= LEAK
