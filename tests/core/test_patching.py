"""Whether a call is packed or padded is decided once, also for a backward that computes it again; `torch.func`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kit.tolerance import tolerance
from torch.utils.checkpoint import CheckpointError, checkpoint
from zoo.models import batch, build

from trl_padfix import remove_padding
from trl_padfix.core.handle import PaddingRemoval


def checkpointed(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    call = lambda ids, mask: model(input_ids=ids, attention_mask=mask, use_cache=False).logits  # noqa: E731
    return checkpoint(call, ids, mask, use_reentrant=False)


def gradients(hook_before: bool, hook_after: bool, disabled_after: bool = False, attach: bool = True) -> Any:
    """Gradients of a checkpointed model; a hook on a layer is there in the forward, or in the backward."""
    model, (ids, mask) = build("qwen2").train(), batch("right")
    hook = lambda module, args, output: None  # noqa: E731
    with remove_padding(model) if attach else nullcontext() as handle:
        registered = model.model.layers[0].register_forward_hook(hook) if hook_before else None
        logits = checkpointed(model, ids, mask)
        if registered is not None:
            registered.remove()
        if hook_after:
            model.model.layers[0].register_forward_hook(hook)
        with handle.disabled() if disabled_after else nullcontext():
            (logits * mask[..., None]).square().mean().backward()
    packed = handle.stats.packed_tokens if attach else 0
    return torch.cat([p.grad.flatten() for p in model.parameters()]), packed


CHANGES = [(True, False, False), (False, True, False), (False, False, True)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_backward_computes_a_call_as_its_forward_did(change, monkeypatch):
    expected, _ = gradients(False, False, attach=False)
    found, packed = gradients(*change)
    assert (found - expected).norm() <= tolerance(expected.norm().item(), terms=64, depth=48)
    assert (packed == 0) is change[0]
    # The negative control: the decision is taken again.
    monkeypatch.setattr(PaddingRemoval, "decision_about", lambda self, tokens: None)
    with pytest.raises(CheckpointError):
        gradients(*change)


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
