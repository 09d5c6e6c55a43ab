"""The state of a packed forward belongs to that forward: threads, models and configs do not share it."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import transformers
from kit.tolerance import rounding
from zoo.models import CONFIGS, batch, build

from trl_padfix import remove_padding
from trl_padfix.core.context import Context


def models_of(sharing: str) -> list[transformers.PreTrainedModel]:
    """The model that each of two threads calls."""
    if sharing == "one model":
        return [build("qwen2")] * 2
    if sharing == "two models":
        return [build("qwen2"), build("mistral", seed=1)]
    config = CONFIGS["qwen2"]()
    torch.manual_seed(0)
    pair = [transformers.Qwen2ForCausalLM(config).eval() for _ in range(2)]
    assert pair[0].config is pair[1].config
    return pair


def disturbs(models: list[transformers.PreTrainedModel], other_packs: bool, here_packs: bool) -> bool:
    """
    Whether a forward fails, gives other logits or is computed in another mode, while another thread is in the middle
    of one; each is packed, or padded within `disabled()`.
    """
    there, here = models
    ids, mask = batch("left")
    own_ids, own_mask = batch("right")
    with torch.no_grad():
        expected = here(own_ids, attention_mask=own_mask, use_cache=False).logits
    inside, done, thread_here = threading.Event(), threading.Event(), threading.current_thread()

    def pause(module, args) -> None:
        if threading.current_thread() is not thread_here:
            inside.set()
            done.wait()

    hook = there.model.layers[0].self_attn.q_proj.register_forward_pre_hook(pause)
    with contextlib.ExitStack() as stack:
        handles = {model: stack.enter_context(remove_padding(model, prefix_sharing=True)) for model in {there, here}}

        def run(model, packs, ids, mask) -> torch.Tensor:
            with contextlib.nullcontext() if packs else handles[model].disabled(), torch.no_grad():
                return model(ids, attention_mask=mask).logits

        thread = threading.Thread(target=run, args=(there, other_packs, ids, mask))
        thread.start()
        inside.wait()
        before = handles[here].stats.forwards
        try:
            found = run(here, here_packs, own_ids, own_mask)
        except Exception:
            return True
        finally:
            packed = handles[here].stats.forwards - before
            done.set()
            thread.join()
            hook.remove()
    return packed != here_packs or bool((found - expected)[own_mask.bool()].abs().max() > rounding(expected))


@pytest.mark.parametrize("sharing", ["one model", "two models", "a shared config"])
def test_a_forward_beside_another_one_is_as_alone(sharing):
    for other_packs, here_packs in ((True, True), (True, False), (False, True)):
        models = models_of(sharing)
        configs = [dict(vars(model.config)) for model in models]
        assert not disturbs(models, other_packs, here_packs)
        assert [dict(vars(model.config)) for model in models] == configs
        assert not [name for model in models for name, module in model.named_modules() if "forward" in vars(module)]


class OfAllThreads:
    """A context variable that has one value for all threads."""

    value = Context()

    def get(self):
        return self.value

    def set(self, value):
        before, self.value = self.value, value
        return before

    reset = set


def test_a_context_that_threads_share_disturbs(monkeypatch):
    monkeypatch.setattr("trl_padfix.core.context._context", OfAllThreads())
    assert disturbs(models_of("one model"), False, True)
