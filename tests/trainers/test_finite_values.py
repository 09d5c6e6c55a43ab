"""Losses and gradients that are not finite are reported with their rows."""

import logging
import re

import pytest
import torch
import trl
from datasets import Dataset
from kit.methods import make_trainer

import trl_padfix


ROWS = [{"text": f"w{3 + i} w4 w5"} for i in range(8)]


def make(folder, **given):
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "train_dataset": Dataset.from_list(ROWS)} | given
    return make_trainer(trl_padfix, "SFT", folder, **given)


def broken_at(call: int, monkeypatch, where: str) -> None:
    """The loss, or the gradient of it alone, is NaN in one forward."""
    calls, compute = [], trl.SFTTrainer.compute_loss

    def compute_loss(self, *args, **kwargs):
        loss = compute(self, *args, **kwargs)
        calls.append(1)
        if len(calls) != call:
            return loss
        if where == "loss":
            return loss * float("nan")
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    monkeypatch.setattr(trl.SFTTrainer, "compute_loss", compute_loss)


@pytest.mark.parametrize(("where", "what"), [("loss", "loss of training"), ("gradient", "norm of the gradient")])
def test_the_step_and_the_rows_are_named(where, what, tmp_path, monkeypatch, caplog):
    trainer = make(tmp_path, max_steps=2, padding_free=True, shuffle_dataset=False)
    broken_at(2, monkeypatch, where)
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        trainer.train()
    said = next(text for text in caplog.messages if "NaN, which" not in text and what in text)
    assert f"The {what} in step 2 is nan" in said or f"The {what} in step 2 is inf" in said
    assert re.search(r"over the rows 0 \(\d+ tokens\), 1 \(\d+ tokens\)", said)
    assert "'w" not in said  # no training data in a log
    assert "`stop_on_nonfinite=True` stops it" in said
    assert trainer.state.global_step == 2


def test_text_of_rows_is_logged_if_it_is_asked_for(tmp_path, monkeypatch, caplog):
    trainer = make(tmp_path, max_steps=2, padding_free=True, shuffle_dataset=False)
    broken_at(2, monkeypatch, "loss")
    with caplog.at_level(logging.DEBUG, logger="trl_padfix"):
        trainer.train()
    assert any("tokens: 'w" in text for text in caplog.messages)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_the_run_stops_before_the_weights_change_if_asked(where, tmp_path, monkeypatch):
    trainer = make(tmp_path, stop_on_nonfinite=True, learning_rate=0.1)
    broken_at(1, monkeypatch, where)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(FloatingPointError, match=r"in step 1 is (nan|inf), over the rows 0"):
        trainer.train()
    assert trainer.state.global_step == 0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_finite_run_says_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        make(tmp_path).train()
    assert not any("The loss" in text or "The norm" in text for text in caplog.messages)
