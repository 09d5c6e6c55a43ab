"""Code that acts in the backward pass: under a token budget it acts once in a step, on the gradient of all rows."""

from functools import cache

import pytest
import torch
from kit.budget_runs import ALL_TRAINERS, BUDGET, assert_same, make, make_recorded, train
from kit.cells import once_each
from transformers import TrainerCallback

from trl_padfix.trainers import backward_hooks


def clamp(parameter):
    parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def step_in_backward(parameter):
    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad / (1e-2 + parameter.grad.norm())
        parameter.grad = torch.zeros_like(parameter)

    parameter.register_post_accumulate_grad_hook(step)


HOOKS = {"clamped": clamp, "stepped": step_in_backward}


def run(name, hook, ours):
    """Figures and weights of three steps with hooks, and the tokens of each forward."""

    def register(trainer):
        for parameter in trainer.model.parameters():
            HOOKS[hook](parameter)

    if name == "grpo":
        trainer = make_recorded("unused", 6, ours=ours)
        register(trainer)
        trainer.train()
        figures, forwards = None, []
    else:
        figures, forwards, trainer = train(name, register, ours=ours)
    return figures, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), forwards


theirs = cache(lambda name, hook: run(name, hook, False)[:2])


@pytest.mark.parametrize(("name", "hook"), once_each([*ALL_TRAINERS, "grpo"], HOOKS))
def test_hooks_act_on_the_gradient_of_a_step(name, hook):
    figures, weights, forwards = run(name, hook, True)
    if name == "grpo":  # which logs more figures than one with recorded rewards has in common
        assert_same(weights, theirs(name, hook)[1], atol=3e-5)  # one of 18,208 is 1.3e-5 off on some processors
        return
    assert_same(figures, theirs(name, hook)[0])
    assert_same(weights, theirs(name, hook)[1])
    assert max(forwards) <= BUDGET[name]


@pytest.mark.parametrize(("name", "hook"), [("sft", "clamped"), ("kto", "stepped")])
def test_once_for_each_micro_batch_they_give_other_weights(name, hook, monkeypatch):
    monkeypatch.setattr(backward_hooks, "LIBRARIES", (*backward_hooks.LIBRARIES, __name__.partition(".")[0]))
    _, weights, _ = run(name, hook, True)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(weights, theirs(name, hook)[1])


def test_a_hook_is_named_and_those_of_libraries_are_not(tmp_path, caplog):
    trainer = make("sft", tmp_path, ours=True)
    weight = trainer.model.lm_head.weight
    assert backward_hooks.gradient_hook_name(trainer) is None
    weight.register_hook(torch.nn.Module().zero_grad)  # a bound method of torch
    assert backward_hooks.gradient_hook_name(trainer) is None
    clamp(weight)
    assert "clamp.<locals>.<lambda>, a gradient hook of " in backward_hooks.gradient_hook_name(trainer)
    with caplog.at_level("WARNING", logger="trl_padfix"):
        trainer.get_train_dataloader()
    assert "acts in the backward pass, on the gradient of a micro-batch" in caplog.text


def test_a_layerwise_optimizer_is_one(tmp_path):
    trainer = make("sft", tmp_path, ours=True)
    trainer.args.optim = type(trainer.args.optim)("apollo_adamw_layerwise")
    assert backward_hooks.gradient_hook_name(trainer) == "optim='apollo_adamw_layerwise'"


def test_backward_hooks_of_modules_are_warned_about(tmp_path, caplog):
    trainer = make("sft", tmp_path, ours=True)
    trainer.model.lm_head.register_full_backward_hook(lambda *args: None)
    with caplog.at_level("WARNING", logger="trl_padfix"):
        trainer.get_train_dataloader()
    assert "the backward hooks of modules (" in caplog.text
    assert "of lm_head) are called for each of them" in caplog.text


def test_a_hook_beside_accumulated_steps_is_refused(tmp_path):
    trainer = make("dpo", tmp_path, ours=True, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    clamp(trainer.model.lm_head.weight)
    with pytest.raises(ValueError, match="acts in the backward pass, of which TRL has several in a step"):
        trainer.train()


def test_a_hook_that_a_callback_registers_is_an_error(tmp_path):
    class Late(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            clamp(model.lm_head.weight)

    trainer = make("sft", tmp_path, ours=True, callbacks=[Late()])
    with pytest.raises(ValueError, match=r"a gradient hook of .* was set during training"):
        trainer.train()
