"""Checkpoints are TRL's: its files, written by its code; a run goes on from the newest one that was finished."""

import json
import logging
import os
import signal

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import build_pairs
from transformers import Trainer, TrainerState

import trl_padfix
from trl_padfix.trainers.resume import checkpoint_to_resume


def make(library, folder, kind="SFT", trainer_class=None, **given):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    build = build_pairs if kind == "DPO" else build_rows
    rows = {"train_dataset": build(16), "eval_dataset": build(4, seed=1), "per_device_train_batch_size": 8}
    return make_trainer(library, kind, folder, trainer_class=trainer_class, **rows | settings | given)


def checkpoints(folder):
    """The checkpoints of a run, the newest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda checkpoint: int(checkpoint.name[11:]), reverse=True)


def losses(folder) -> list[tuple[float, float]]:
    newest, *_ = checkpoints(folder)
    logs = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [(log["loss"], log["grad_norm"]) for log in logs if "loss" in log]


def test_the_newest_one_with_a_state_is_taken_and_nothing_else_is_judged(tmp_path, caplog):
    for step in (2, 10, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
        (tmp_path / f"checkpoint-{step}" / "notes.json").write_text('{"a": 1}\n{"a": 2}')
    assert all(checkpoint_to_resume(none, tmp_path) is None for none in (None, False, "false", ""))
    assert checkpoint_to_resume("LATEST", tmp_path) == str(tmp_path / "checkpoint-10")
    for cut in ("", '{"epoch": '):
        (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(cut)
        with caplog.at_level(logging.WARNING):
            assert checkpoint_to_resume(True, tmp_path) == str(tmp_path / "checkpoint-4")
    assert "Skipping" in caplog.text
    assert checkpoint_to_resume(str(tmp_path / "checkpoint-10"), tmp_path) == str(tmp_path / "checkpoint-10")
    with pytest.raises(ValueError, match=r"there is no complete checkpoint in .* to begin from the start"):
        checkpoint_to_resume("true", tmp_path / "nowhere")


@pytest.mark.parametrize("fields", [{}, {"padding_free": True}])
def test_a_checkpoint_without_an_optimizer_is_resumed_as_in_trl(fields, tmp_path):
    found = []
    for library, own in ((trl, {}), (trl_padfix, fields)):
        folder = tmp_path / library.__name__
        make(library, folder, max_steps=2).train()
        (folder / "checkpoint-2" / "optimizer.pt").unlink()
        trainer = make(library, folder, **own)
        trainer.train(resume_from_checkpoint=True)
        assert trainer._initial_global_step == 2
        found.append(losses(folder))
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("fields", [{}, {"padding_free": True}])
def test_the_files_of_a_run_are_trls(kind, fields, tmp_path):
    """Also where a checkpoint is written into a folder that has a file of a user's."""
    found = []
    for library, own in ((trl, {}), (trl_padfix, fields)):
        folder = tmp_path / library.__name__
        (folder / "checkpoint-1").mkdir(parents=True)
        (folder / "checkpoint-1" / "earlier.bin").touch()
        make(library, folder, kind, max_steps=2, **own).train()
        found.append({str(p.relative_to(folder)) for p in folder.rglob("*")})
    assert found[1] == found[0]
    assert "checkpoint-1/earlier.bin" in found[1]


MOMENTS = {
    "after the weights": (Trainer, "_save_optimizer_and_scheduler"),
    "after the optimizer": (Trainer, "_save_rng_state"),
    "before the state": (TrainerState, "save_to_json"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_during_a_save_loses_the_unfinished_checkpoint_alone(moment, tmp_path, monkeypatch):
    make(trl_padfix, tmp_path / "whole").train()
    owner, name = MOMENTS[moment]
    save, calls = getattr(owner, name), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return save(*args, **kwargs)

    if (process := os.fork()) == 0:
        monkeypatch.setattr(owner, name, killed)
        make(trl_padfix, tmp_path / "run").train()
        os._exit(0)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [c.name for c in checkpoints(tmp_path / "run")] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    with pytest.raises(FileNotFoundError):  # the control
        make(trl, tmp_path / "run").train(resume_from_checkpoint=True)
    resumed = make(trl_padfix, tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 2
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
