"""The longest row of the first batch is compared with that row alone, and a wrong padded forward stops no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.methods import make_trainer
from kit.processes import trained
from kit.trainer_runs import build_pairs, leaking_layout

import trl_padfix
import trl_padfix.core.call.layout_of
from trl_padfix import ParityError
from trl_padfix.core.parity import check, sample


CONFIG = {"padding_free": True, "max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1}


def make(kind: str, folder: Any, **given: Any) -> Any:
    return make_trainer(trl_padfix, kind, folder, **CONFIG | given)


right_layout = trl_padfix.core.call.layout_of.padding_free_layout


def test_an_error_of_long_rows_only_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "SNIPPET_TOKENS", 12)
    leaks_in_long_rows = lambda mask: (leaking_layout if mask.shape[1] > 20 else right_layout)(mask)  # noqa: E731
    monkeypatch.setattr(trl_padfix.core.call.layout_of, "padding_free_layout", leaks_in_long_rows)
    trainer = make("DPO", tmp_path)
    with pytest.raises(ParityError, match=r"wrong for its longest row, and shorter rows pass"):
        trainer.train()
    report = trainer.padding.parity["train"][0]
    assert report.scores_agree
    assert not report.ok
    assert not report.longest.ok
    trainer = make("DPO", tmp_path)
    with monkeypatch.context() as without:
        without.setattr(check, "_compare_longest", lambda *given: None)
        trainer.train()  # nothing else sees it


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
