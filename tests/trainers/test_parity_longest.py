"""After the first steps, the longest row so far is compared with that row alone, and the training does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.methods import make_trainer
from kit.processes import trained
from kit.trainer_runs import build_pairs, figures, leaking_layout

import trl_padfix
import trl_padfix.core.call.layout_of
import trl_padfix.trainers.parts.parity as parts
from trl_padfix import ParityError
from trl_padfix.core.parity import sample


CONFIG = {"padding_free": True, "max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1}


def make(kind: str, folder: Any, **given: Any) -> Any:
    return make_trainer(trl_padfix, kind, folder, **CONFIG | given)


@pytest.fixture(autouse=True)
def _after_two_steps(monkeypatch):
    monkeypatch.setattr(parts, "LONG_ROW_AFTER", 2)


def test_the_training_does_not_notice(tmp_path, monkeypatch):
    compared = []
    check = parts.check_longest_row
    monkeypatch.setattr(parts, "check_longest_row", lambda *given: compared.append(given) or check(*given))
    runs = []
    for first_step in (99, 2):  # after the end of the training, and within it
        monkeypatch.setattr(parts, "LONG_ROW_AFTER", first_step)
        trainer, calls = make("DPO", tmp_path, gradient_accumulation_steps=2), []
        model = trainer.model
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        model.model.register_forward_hook(
            lambda *_, calls=calls: calls.append(1)
        )  # of the decoder itself: no late hook
        torch.manual_seed(0)
        trainer.train()
        stats = vars(trainer.padding.stats)
        runs.append((figures(trainer.state.log_history).tolist(), stats, len(calls), torch.get_rng_state().tolist()))
        assert all(p.grad is None for p in model.parameters())
    assert len(compared) == 1
    assert runs[0] == runs[1]
    assert runs[0][2] > 2 * 5


def leaks_in_long_rows(mask: torch.Tensor) -> Any:
    return leaking_layout(mask) if mask.shape[1] > 20 else right_layout(mask)


right_layout = trl_padfix.core.call.layout_of.padding_free_layout


def test_an_error_of_long_rows_only_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "SNIPPET_TOKENS", 12)
    monkeypatch.setattr(trl_padfix.core.call.layout_of, "padding_free_layout", leaks_in_long_rows)
    trainer = make("DPO", tmp_path)
    with pytest.raises(ParityError, match=r"longest row of the first 2 steps .* Shorter rows of this model pass"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.padding.parity["train"][0].ok


def test_a_wrong_padded_forward_is_said_once_and_the_run_goes_on(tmp_path, caplog):
    trainer = make("DPO", tmp_path, eval_on_start=True, eval_dataset=build_pairs(8, seed=1))
    spoil = lambda module, args, out: out + 0.5 if len(out) > 1 else out  # noqa: E731
    trainer.model.model.layers[0].register_forward_hook(spoil)
    trainer.train()
    assert trainer.state.global_step == 5
    said = [text for text in caplog.messages if "The padded forward of this model is wrong" in text]
    assert len(said) == 1
    assert "From each row alone (torch.float64), packed differs by mean" in said[0]
    assert trainer.padding.stats.padded_forwards == 0


@pytest.mark.slow
def test_a_parity_error_of_one_process_is_raised_on_both(tmp_path):
    """And none waits for the other."""
    trained("multi_gpu", tmp_path, "kit.process_errors", tmp_path)
    first, second = (json.loads(Path(tmp_path, f"errors-{rank}.json").read_text()) for rank in range(2))
    for fault in ("first batch", "longest row"):
        assert second[fault].startswith("ParityError: ")
        assert first[fault].startswith("RuntimeError: Process 1 stopped, and this process would wait for it.")
        assert first[fault].endswith(second[fault])
    assert "longest row" in second["longest row"]
    assert first[""] == second[""] == ""
