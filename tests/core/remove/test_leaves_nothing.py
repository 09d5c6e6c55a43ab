"""Removing restores everything; copies, wrappers and checkpoints are as without us."""

from __future__ import annotations

import copy
import functools
import gc
import io
import types
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import transformers
from zoo.model_numbers import DISTINCT, REAL, assert_equal_where_real, logits_of
from zoo.models import batch, build

from trl_padfix import PaddingRemovalError, remove_padding
from trl_padfix.core import handle
from trl_padfix.core.model import older


# -- nothing stays behind


def traces(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """All that an attachment could leave in a model, its config and transformers' functions."""
    attributes = {
        f"{name}.{attribute}": len(value) if attribute.endswith("_hooks") else None
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
    }
    return attributes | vars(model.config) | {"search": transformers.masking_utils.find_packed_sequence_indices}


@pytest.fixture
def no_other_handles(monkeypatch):
    """Other tests may have left handles, which die at any time."""
    masking, name = transformers.masking_utils, "find_packed_sequence_indices"
    search = getattr(masking, name)
    monkeypatch.setattr(masking, name, search.search if isinstance(search, older._SparedSearch) else search)
    monkeypatch.setattr(older, "_search_users", weakref.WeakSet())


@pytest.mark.usefixtures("no_other_handles")
@pytest.mark.parametrize(("error", "training"), [(None, True), (ValueError, True), (KeyboardInterrupt, False)])
def test_removing_restores_everything_also_after_an_exception(mixed, training, error):
    model, ids, mask, logits = mixed
    before, kept = copy.deepcopy(traces(model)), []

    def fail(*_: Any) -> None:
        if error is not None:
            raise error

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    for attached in (remove_padding(model, prefix_sharing=True) for _ in range(3)):
        with pytest.raises(error) if error else nullcontext() as raised, torch.set_grad_enabled(training), attached:
            model(ids, mask)
        attached.remove()  # does no harm
        kept.append(raised)  # the frames live on, as those of the last error do in a notebook
    remove_padding(model).remove()
    hook.remove()

    assert traces(model) == before
    assert torch.equal(logits_of(model, ids, mask), logits)


@pytest.mark.usefixtures("no_other_handles")
def test_an_interrupt_at_the_end_of_an_attachment_restores_everything(mixed, monkeypatch):
    model = mixed[0]
    before = copy.deepcopy(traces(model))
    monkeypatch.setattr(handle, "ModuleChanges", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        remove_padding(model)
    assert traces(model) == before


def test_a_wrapper_around_the_search_for_packed_sequences_stays(monkeypatch):
    masking, name = transformers.masking_utils, "find_packed_sequence_indices"
    monkeypatch.setattr(masking, name, getattr(masking, name))  # restored at the end
    monkeypatch.setattr(older, "_search_users", weakref.WeakSet())  # without handles of other tests
    with remove_padding(build("qwen2")):
        ours = getattr(masking, name)
        masking.find_packed_sequence_indices = wrapper = functools.wraps(ours)(lambda positions: ours(positions))
    assert getattr(masking, name) is wrapper


def test_handles_and_models_die():
    ids, mask = batch("mixed")
    model = build("qwen2")
    handle = remove_padding(model)
    model(ids, mask).logits.sum().backward()
    handle.remove()
    removed = weakref.ref(handle)
    del handle
    gc.collect()
    assert removed() is None

    handle = remove_padding(model)
    model(ids, mask)
    dead = [weakref.ref(handle), weakref.ref(model)]
    del handle, model
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


def test_layouts_die_with_their_batch_without_waiting_for_the_garbage_collector():
    model = build("qwen2")
    gc.collect()
    gc.disable()
    try:
        for sharing in (False, True):
            with remove_padding(model, prefix_sharing=sharing):
                ids, mask = batch("mixed")
                logits_of(model, ids, mask)
                refs = [weakref.ref(ids), weakref.ref(mask)]
                del ids, mask
                assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_a_patch_on_top_stays_when_ours_goes(mixed):
    model, ids, mask, expected = mixed
    handle = remove_padding(model)
    ours, calls = model.model.forward, []

    @functools.wraps(ours)
    def on_top(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ours(*args, **kwargs)

    model.model.forward = on_top
    logits_of(model, ids, mask)
    handle.remove()

    assert torch.equal(logits_of(model, ids, mask), expected)
    assert calls == [1, 1]
    assert handle.stats.packed_tokens == REAL
    with pytest.raises(PaddingRemovalError, match=r"replaced before .*hides the module that it calls"):
        remove_padding(model)
    assert model.model.forward is on_top
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == ["model"]


@pytest.mark.parametrize("hook", [False, True], ids=["method", "accelerate's hook"])
def test_a_forward_that_was_replaced_before_goes_along(hook):
    ids, mask = batch("mixed")
    model, calls = build("qwen2"), []
    expected = logits_of(model, ids, mask)

    def counted(forward):
        @functools.wraps(forward)
        def call(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(self, *args, **kwargs)

        return call

    for module in (model.model, model.model.layers[0].self_attn):
        if hook:
            accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())
        else:
            module.forward = types.MethodType(counted(type(module).forward), module)
    with remove_padding(model, prefix_sharing=True) as handle:
        assert_equal_where_real(logits_of(model, ids, mask), expected, mask)
    assert handle.stats.packed_tokens == DISTINCT
    assert hook or len(calls) == 2


# -- copies, checkpoints


def test_a_model_that_is_saved_whole_has_no_patches(mixed):
    model, ids, mask, expected = mixed
    file = io.BytesIO()
    with remove_padding(model, prefix_sharing=True) as handle:
        assert not torch.equal(logits_of(model, ids, mask), expected)  # zero at padding
        torch.save(model, file)
        assert handle.stats.forwards == 1
    assert b"trl_padfix.core" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(logits_of(loaded, ids, mask), expected)
    with remove_padding(loaded) as handle:
        logits_of(loaded, ids, mask)
        assert handle.stats.forwards == 1


def test_checkpoints_hold_nothing_of_ours(mixed, tmp_path):
    model, ids, mask, expected = mixed
    model.save_pretrained(tmp_path / "before")
    with remove_padding(model):
        logits_of(model, ids, mask)
        assert model.state_dict().keys() == build("qwen2").state_dict().keys()
        model.save_pretrained(tmp_path / "attached")

    names = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert sorted(path.name for path in (tmp_path / "attached").iterdir()) == names
    for name in names:
        assert (tmp_path / "attached" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "attached").eval()
    assert torch.equal(logits_of(reloaded, ids, mask), expected)
