"""Hooks that are registered in the middle of a training: its steps go on padded, with TRL's figures."""

import pytest
import torch
import trl
from kit.budget_runs import assert_same, build_branching, make
from kit.trainer_runs import our_warnings, trained
from transformers import TrainerCallback
from zoo import models

import trl_padfix
from trl_padfix import ParityError
from trl_padfix.core.errors import UnpackableCallError
from trl_padfix.core.handle import PaddingRemoval
from trl_padfix.trainers.parts import padding_side


class Hooking(TrainerCallback):
    """Registers a hook on the embedding after the first step: `change` of its output."""

    def __init__(self, change):
        self.change = change

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 1:
            model.get_input_embeddings().register_forward_hook(lambda module, args, output: self.change(output))


def by_column(states):
    return states * (1 + 0.02 * torch.arange(states.shape[-2]))[:, None]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.layout.shared_prefixes.MIN_SAVED_TOKENS", 1)

    def train(name, change, ours, **given):
        given = {"max_steps": 3} | given
        data = build_branching(name)
        given = {"train_dataset": data, "eval_dataset": data.select(range(4))} | given
        trainer = make(trl_padfix if ours else trl, name, tmp_path, budget=ours, callbacks=[Hooking(change)], **given)
        return trained(trainer), trainer

    return train


@pytest.mark.parametrize("name", ["SFT", "KTO"])
def test_chunks_that_share_prefixes_go_on_padded_and_so_does_the_evaluation(name, run, monkeypatch, caplog):
    expected, _ = run(name, by_column, False)
    figures, trainer = run(name, by_column, True, prefix_sharing=True)
    assert_same(figures, expected)
    assert trainer.padding.stats.packed_tokens > 0  # those of the first step
    assert trainer.padding.stats.padded_forwards > 0
    assert any("was registered as a hook of a Embedding" in text for text in our_warnings(caplog))
    monkeypatch.setattr(PaddingRemoval, "has_changed", False)
    with pytest.raises((UnpackableCallError, ParityError), match=r"was registered as a hook|parity FAILED"):
        run(name, by_column, True, prefix_sharing=True, parity_check=True)


def test_padded_on_the_left_they_are_numbered_as_packed_ones(run, monkeypatch):
    """GPT-2 itself numbers the columns of a batch."""
    build = lambda: {"model": models.build("gpt2").train(), "ref_model": models.build("gpt2", seed=1)}  # noqa: E731
    expected, _ = run("DPO", lambda states: states * 1.1, False, **build())
    mode = {"padding_side": "left", "max_tokens_per_batch": None}
    figures, trainer = run("DPO", lambda states: states * 1.1, True, **mode, **build())
    assert_same(figures, expected)
    assert trainer.padding.stats.padded_forwards > 0
    monkeypatch.setattr(padding_side, "number_padded_rows", lambda model: None)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(run("DPO", lambda states: states * 1.1, True, **mode, **build())[0], expected)
