"""Patches stay on models that accelerate has prepared, and in copies; calls of checkpoints and `torch.func`."""

from __future__ import annotations

import copy
import functools
import inspect
from contextlib import nullcontext
from types import CellType, FunctionType, MethodType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from kit.observe import entered_tokens
from kit.tolerance import tolerance
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import AutoModel, AutoModelForSequenceClassification
from zoo.models import PAD, batch, build

from trl_padfix import PaddingRemoval, remove_padding
from trl_padfix.core.model import patching, views
from trl_padfix.core.model.inspection import runs_another
from trl_padfix.core.model.patching import RunnerPatch, patches_on
from trl_padfix.core.patches.heads import LMHeadPatch
from trl_padfix.core.remove import attach_runner_patch


IDS, MASK = batch("right")


def prepare(model: Any, precision: str) -> Any:
    AcceleratorState._reset_state(True)
    return Accelerator(mixed_precision=precision, cpu=True).prepare_model(model)


@pytest.fixture(autouse=True)
def _clean_state():
    yield
    AcceleratorState._reset_state(True)


def call(model: Any, **more: Any) -> torch.Tensor:
    output = model(**{"input_ids": IDS, "attention_mask": MASK, "use_cache": False} | more)
    return (output.logits if "logits" in output else output.last_hidden_state).float()


KINDS = {
    "causal": {},
    "decoder": {"auto": AutoModel},
    "classifier": {"auto": AutoModelForSequenceClassification, "num_labels": 1, "pad_token_id": PAD},
}


@pytest.mark.parametrize(("kind", "precision"), [("causal", "bf16"), ("decoder", "no")])
def test_a_copy_of_a_prepared_model_packs_with_its_own_weights(kind, precision):
    model = build("qwen2", **KINDS[kind])
    handle = remove_padding(model)
    model = prepare(model, precision)
    before = call(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    with entered_tokens(twin) as entered:
        found = call(twin)
    assert entered == [int(MASK.sum())]
    assert handle.stats.forwards == 1  # the original's handle does not count calls of the copy
    assert not torch.allclose(found, before, rtol=0.01)
    assert torch.equal(call(model), before)
    assert not {id(patch.attachment) for m in twin.modules() for patch in patches_on(m)} & {id(handle)}
    handle.remove()
    assert torch.equal(call(twin), found)


@pytest.mark.parametrize(
    ("kind", "keeps_wrapper", "precision"),
    [("causal", True, "bf16"), ("decoder", False, "no"), ("classifier", False, "bf16")],
)
def test_removal_beneath_a_wrapper_and_a_second_attachment(kind, keeps_wrapper, precision):
    """Several trainers in turn prepare one model; each attaches, and removes."""
    model, plain = build("qwen2", **KINDS[kind]), build("qwen2", **KINDS[kind])
    for _ in range(3):
        handle = remove_padding(model)
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision=precision, cpu=True)
        prepared = accelerator.prepare_model(model)
        call(prepared)
        assert handle.stats.packed_tokens == MASK.sum()
        handle.remove()
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=keeps_wrapper)
    call(prepared)
    assert handle.stats.forwards == 1
    assert not patches_on(model)
    assert torch.equal(call(model), call(prepare(plain, precision) if keeps_wrapper else plain))
    assert isinstance(model.state_dict(), dict)


@pytest.mark.parametrize("calls_before_removal", [True, False])
def test_a_model_that_was_prepared_first_leaves_mixed_precision_when_it_is_unwrapped(calls_before_removal):
    model = build("qwen2")
    expected = call(model)
    prepared = prepare(model, "bf16")
    handle = remove_padding(model)
    half = call(prepared)
    unwrapped = Accelerator(mixed_precision="bf16", cpu=True).unwrap_model(prepared, keep_fp32_wrapper=False)
    real, limit = MASK.bool(), tolerance(expected.abs().max().item(), terms=64, depth=24)
    if calls_before_removal:
        for _ in range(2):
            assert (call(unwrapped) - expected)[real].abs().max() <= limit
        assert handle.stats.packed_tokens == 3 * MASK.sum()
    handle.remove()
    assert torch.equal(call(unwrapped), expected)
    assert "forward" not in vars(model)
    assert (half - expected)[real].abs().max() > 10 * limit  # the control


def test_a_deep_copy_of_an_attached_model_can_be_attached():
    model = build("qwen2")
    loaded = model.config._attn_implementation
    handle = remove_padding(model, attn_implementation="eager")
    twin, third, fourth = (copy.deepcopy(model) for _ in range(3))
    with pytest.raises(ValueError, match="attn_implementation='auto'"):
        remove_padding(twin, attn_implementation="auto")
    assert PaddingRemoval.of(twin).enabled
    with remove_padding(twin, prefix_sharing=True) as second:
        call(twin)
        assert (second.stats.forwards, handle.stats.forwards) == (1, 0)
        assert (twin.config._attn_implementation, model.config._attn_implementation) == (loaded, "eager")
    with remove_padding(third, attn_implementation="eager"):
        assert third.config._attn_implementation == "eager"
    assert third.config._attn_implementation == loaded
    PaddingRemoval.of(fourth).remove()
    for plain in (twin, fourth):
        assert PaddingRemoval.of(plain) is None
        assert not any(patches_on(module) for module in plain.modules())
    assert PaddingRemoval.of(model) is handle
    with pytest.raises(ValueError, match=r"share a decoder. `remove_padding` did"):  # the control
        remove_padding(model.model)


def test_a_copy_of_a_part_holds_no_copy_of_the_model():
    """PEFT copies the modules of `modules_to_save`."""
    model, memo, states = build("qwen2"), {}, torch.ones(1, 32)
    with remove_padding(model):
        head = copy.deepcopy(model.lm_head, memo)
    assert id(model) not in memo
    assert torch.equal(head(states), model.lm_head(states))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_decoder_may_copy_its_config(copied):
    view = views.ConfigView(build("qwen2").config)
    twin = copied(view)
    twin.use_cache = not view.use_cache
    assert twin.use_cache is not view.use_cache
    assert twin._attn_implementation == view._attn_implementation == views.PACKED_ATTENTION


def test_a_method_that_was_kept_passes_calls_on_after_removal():
    model = build("qwen2")
    expected = call(model)
    with remove_padding(model):
        kept = model.forward
    model.forward = lambda **kwargs: kept(**kwargs)
    assert torch.equal(call(model), expected)


def test_a_closure_of_a_library_may_have_an_empty_cell():
    cell = CellType()
    assert not runs_another(FunctionType((lambda: cell).__code__, vars(torch), closure=(cell,)), build("qwen2"))


def test_a_wrapper_that_copies_our_attributes_may_get_another_patch_on_top():
    """As the runner of a token budget is: `functools.wraps` copies the signature of the function of a method."""
    model = build("qwen2")
    parameters = [*inspect.signature(model.forward).parameters]
    with remove_padding(model) as handle:
        method = model.forward
        model.forward = functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))
        attach_runner_patch(model)
        assert [*inspect.signature(model.forward).parameters] == parameters
        call(model)
        assert handle.stats.forwards == 1


def test_a_method_around_ours_runs_on_the_view_of_a_second_attachment():
    model, modules = build("qwen2"), []
    expected, attention = call(model), model.model.layers[0].self_attn
    with remove_padding(model):
        method = attention.forward

        def around(module: Any, *args: Any, **kwargs: Any) -> Any:
            modules.append(module)
            return method.__func__(module, *args, **kwargs)

        attention.forward = MethodType(around, attention)
    with remove_padding(model) as handle:
        found = call(model)
        assert handle.stats.packed_tokens == MASK.sum()
    limit = tolerance(expected.abs().max().item(), terms=64, depth=24)
    assert (found - expected)[MASK.bool()].abs().max() <= limit
    assert [views.viewed_module(module) for module in modules] == [attention]
    assert modules != [attention]
    assert torch.equal(call(model), expected)


def test_a_patch_that_comes_later_runs_within_mixed_precision_once():
    """Beneath accelerate's wrapper, where it can be unwrapped, and taken off."""
    model = build("qwen2")
    with remove_padding(model) as handle:
        prepared = prepare(model, "bf16")
        wrapper = model.forward
        later = attach_runner_patch(model)
        assert model.forward is wrapper
        assert [type(patch) for patch in patches_on(model)] == [RunnerPatch, LMHeadPatch]
        call(prepared)
        assert handle.stats.forwards == 1
    later.remove()
    assert not patches_on(model)
    assert torch.equal(call(prepared), call(prepare(build("qwen2"), "bf16")))


# -- computed padded: calls within a checkpoint around the model, and within `torch.func`


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
