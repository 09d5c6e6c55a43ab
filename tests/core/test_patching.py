"""Calls that are computed padded: those within a checkpoint around the model, and those within `torch.func`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.tolerance import tolerance
from torch.utils.checkpoint import CheckpointError, checkpoint
from zoo.models import batch, build

import trl_padfix.core.model.patching as patching
from trl_padfix import remove_padding


def gradients(attach: bool = True, hook_after: bool = False, disabled_after: bool = False) -> Any:
    """Gradients of a checkpointed model, and its handle; something may change before its backward."""
    model, (ids, mask) = build("qwen2").train(), batch("right")

    def logits(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    with remove_padding(model) if attach else nullcontext() as handle:
        found = checkpoint(logits, ids, mask, use_reentrant=False)
        if hook_after:
            model.model.layers[0].register_forward_hook(lambda module, args, output: None)
        with handle.disabled() if disabled_after else nullcontext():
            (found * mask[..., None]).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), handle


@pytest.mark.parametrize("change", [{}, {"hook_after": True}, {"disabled_after": True}])
def test_a_checkpoint_around_the_model_is_computed_padded(change, monkeypatch, caplog):
    expected, _ = gradients(attach=False)
    found, handle = gradients(**change)
    assert (found - expected).norm() <= tolerance(expected.norm().item(), terms=64, depth=48)
    assert (handle.stats.forwards, handle.stats.padded_forwards) == (0, 1)
    assert "a checkpoint around it" in caplog.text
    # The negative control: packed in the forward, and after a change padded in the backward.
    monkeypatch.setattr(patching, "in_checkpoint", lambda: False)
    with pytest.raises(CheckpointError) if change else nullcontext():
        gradients(**change)


def test_a_call_within_torch_func_is_computed_padded():
    model, (ids, mask) = build("qwen2"), batch("right")
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        call = {"attention_mask": mask, "use_cache": False}
        return torch.func.functional_call(model, parameters, (ids,), call).logits.square().mean()

    expected = torch.func.grad(loss)(parameters)
    with remove_padding(model) as handle:
        found = torch.func.grad(loss)(parameters)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (handle.stats.padded_forwards, handle.stats.forwards) == (1, 0)
