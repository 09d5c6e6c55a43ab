"""Code that acts in the backward pass: under a token budget it acts once on a batch, on the gradient of all rows."""

from functools import cache

import pytest
import torch
import trl
from kit.budget_runs import BUDGETS, assert_same, make, train_split

import trl_padfix
from trl_padfix.trainers.checks import user_code


def clamp(parameter):
    parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def step_in_backward(parameter):
    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad / (1e-2 + parameter.grad.norm())
        parameter.grad = torch.zeros_like(parameter)

    parameter.register_post_accumulate_grad_hook(step)


HOOKS = {"clamped": clamp, "stepped": step_in_backward}


def run(kind, hook, ours, **config):
    """Three steps with hooks."""
    trainer = make(trl_padfix if ours else trl, kind, "unused", budget=ours, **config)
    for parameter in trainer.model.parameters():
        HOOKS[hook](parameter)
    return train_split(trainer)


theirs = cache(lambda kind, hook, **config: run(kind, hook, False, **config).figures)


@pytest.mark.parametrize(("kind", "hook"), [("SFT", "clamped"), ("KTO", "stepped")])
def test_hooks_act_on_the_gradient_of_a_batch(kind, hook):
    ours = run(kind, hook, True)
    assert_same(ours.figures, theirs(kind, hook))
    assert max(ours.forwards) <= BUDGETS[kind]


def test_once_for_each_chunk_they_give_other_weights(monkeypatch):
    monkeypatch.setattr(user_code, "LIBRARIES", user_code.LIBRARIES | {__name__.partition(".")[0]})
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("SFT", "clamped", True).figures, theirs("SFT", "clamped"), factor=10)


def test_a_layerwise_optimizer_is_one(tmp_path):
    trainer = make(trl_padfix, "SFT", tmp_path, budget=True)
    trainer.args.optim = type(trainer.args.optim)("apollo_adamw_layerwise")
    assert user_code.gradient_hook_name(trainer) == "optim='apollo_adamw_layerwise'"
