"""Checkpoints appear whole or not at all, whatever ends the process, and a run goes on from the newest whole one."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.methods import make_trainer
from kit.rows import build_rows
from transformers import Trainer, TrainerState

import trl_padfix
from trl_padfix.files import UnwritableError
from trl_padfix.trainers.checkpoints.checkpoints import checkpoints_of, what_is_missing
from trl_padfix.trainers.checkpoints.whole_checkpoints import BESIDE


def make(library, folder, **given):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    rows = {"train_dataset": build_rows(16), "eval_dataset": build_rows(4, seed=1), "per_device_train_batch_size": 8}
    return make_trainer(library, "SFT", folder, **rows | settings | given)


def losses(folder) -> list[tuple[float, float]]:
    newest = checkpoints_of(folder)[0]
    logs = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [(log["loss"], log["grad_norm"]) for log in logs if "loss" in log]


BREAKS = {
    "after the weights": (Trainer, "_save_optimizer_and_scheduler"),
    "after the optimizer": (Trainer, "_save_rng_state"),
    "before the state": (TrainerState, "save_to_json"),
}


@pytest.mark.parametrize("moment", slow_but(["after the weights"], BREAKS))
def test_a_save_that_is_broken_off_leaves_nothing_in_its_place(moment, tmp_path, monkeypatch):
    make(trl_padfix, tmp_path / "whole").train()
    owner, name = BREAKS[moment]
    save, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return save(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, broken)
        with pytest.raises(KeyboardInterrupt):
            make(trl_padfix, tmp_path / "run").train()
    assert [c.name for c in checkpoints_of(tmp_path / "run")] == ["checkpoint-2", "checkpoint-1"]
    assert all(what_is_missing(c) is None for c in checkpoints_of(tmp_path / "run"))
    left = tmp_path / "run" / BESIDE / "checkpoint-3"
    assert not left.exists()
    left.mkdir(parents=True)  # as after a SIGKILL
    resumed = make(trl_padfix, tmp_path / "run")
    resumed.train(resume_from_checkpoint="latest")
    assert not left.parent.exists()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not any(type(c).__name__ == "SamplerEpochs" for c in resumed.callback_handler.callbacks)


def test_in_trl_the_half_is_in_its_place(tmp_path, monkeypatch):
    """The control: what the first test sees broken off is there, by its name, where Trainer writes it."""

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_rng_state", broken)
    with pytest.raises(KeyboardInterrupt):
        make(trl, tmp_path).train()
    assert what_is_missing(tmp_path / "checkpoint-1") == "`trainer_state.json` is missing"


@pytest.mark.parametrize("asked", slow_but([True], [True, "latest", "path"]))
def test_a_script_goes_on_from_the_newest_whole_checkpoint(asked, tmp_path, caplog):
    make(trl_padfix, tmp_path / "whole").train()
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run)
    for step in (4, 5):
        (run / f"checkpoint-{step}" / "optimizer.pt").unlink()  # as another program left it
    with caplog.at_level(logging.WARNING):
        asked = str(run / "checkpoint-3") if asked == "path" else asked
        trainer = make(trl_padfix, run)
        trainer.train(resume_from_checkpoint=asked)
    assert ("checkpoint-5, which is half-written" in caplog.text) == ("checkpoint-" not in str(asked))
    assert trainer._initial_global_step == 3
    assert losses(run) == losses(tmp_path / "whole")
    (run / "checkpoint-4" / "optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"half-written \(`optimizer.pt` is missing\)"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))


@pytest.mark.parametrize(
    "config",
    [
        {"save_total_limit": 2},
        {"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps"},
        {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "save_total_limit": 1},
    ],
    ids=["limit", "best at end", "best alone"],
)
def test_what_is_kept_and_named_best_is_as_in_trl(config, tmp_path):
    found = {}
    for library in (trl, trl_padfix):
        folder = tmp_path / library.__name__
        trainer = make(library, folder, **config | {"learning_rate": 0.02})
        trainer.train()
        newest = checkpoints_of(folder)[0]
        state = json.loads((newest / "trainer_state.json").read_text())
        best = state["best_model_checkpoint"]
        assert best == trainer.state.best_model_checkpoint
        found[library] = (
            [c.name for c in checkpoints_of(folder)],
            best and best.replace(str(folder), ""),
            {p.name for p in newest.iterdir()},
            torch.cat([p.flatten() for p in trainer.model.parameters()]).sum().item(),
        )
        assert BESIDE not in {p.name for p in folder.iterdir()}
    assert found[trl] == found[trl_padfix]


def test_a_checkpoint_of_an_earlier_run_is_replaced(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "stale").touch()
    make(trl_padfix, tmp_path, max_steps=1).train()
    assert not (tmp_path / "checkpoint-1" / "stale").exists()
    assert what_is_missing(tmp_path / "checkpoint-1") is None


def test_an_upload_begins_when_the_checkpoint_is_in_its_place(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: seen.append(what_is_missing(folder)))
    trainer = make(trl_padfix, tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(type(trainer), "init_hf_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr(type(trainer), "push_to_hub", lambda *args, **kwargs: None)
    trainer.train()
    assert seen == [None, None]


def test_a_full_disk_names_the_checkpoint_that_is_safe(tmp_path, monkeypatch):
    save, calls = Trainer._save_rng_state, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", "rng_state.pth")
        return save(*args, **kwargs)

    monkeypatch.setattr(Trainer, "_save_rng_state", full)
    with pytest.raises(UnwritableError, match=r"the disk is full.*MiB are free.*checkpoint-1 \(one takes"):
        make(trl_padfix, tmp_path).train()
    assert [c.name for c in checkpoints_of(tmp_path)] == ["checkpoint-1"]
