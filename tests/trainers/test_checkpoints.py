"""Checkpoints appear whole or not at all, and a run goes on from the newest whole one."""

import json
import logging

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.methods import make_trainer
from kit.rows import build_rows
from safetensors.torch import save_file
from transformers import Trainer, TrainerState

import trl_padfix
from trl_padfix.trainers.parts.checkpoints import BESIDE, checkpoint_to_resume, checkpoints_of, what_is_missing


FILES = ("trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def write(folder, files=FILES):
    """A checkpoint as `Trainer` writes it."""
    folder.mkdir(parents=True)
    for name in files:
        if name.endswith("json"):
            (folder / name).write_text(json.dumps({"global_step": 2}))
        elif name.endswith("safetensors"):
            save_file({"w": torch.ones(100)}, folder / name)
        else:
            torch.save({"state": torch.ones(100)}, folder / name)
    return folder


def make(library, folder, **given):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    rows = {"train_dataset": build_rows(16), "eval_dataset": build_rows(4, seed=1), "per_device_train_batch_size": 8}
    return make_trainer(library, "SFT", folder, **rows | settings | given)


def losses(folder) -> list[tuple[float, float]]:
    newest = checkpoints_of(folder)[0]
    logs = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [(log["loss"], log["grad_norm"]) for log in logs if "loss" in log]


def test_a_missing_and_a_truncated_file_are_named(tmp_path):
    for name in FILES:
        checkpoint = write(tmp_path / name / "checkpoint-2")
        assert what_is_missing(checkpoint) is None
        whole = (checkpoint / name).read_bytes()
        for size in (0, len(whole) // 2, len(whole) - 1):
            (checkpoint / name).write_bytes(whole[:size])
            assert what_is_missing(checkpoint) == f"`{name}` is cut short"
        (checkpoint / name).unlink()
        expected = {"model.safetensors": "there are no weights", "rng_state.pth": None}
        assert what_is_missing(checkpoint) == expected.get(name, f"`{name}` is missing")


def test_shards_adapters_and_checkpoints_of_a_model_alone(tmp_path):
    assert what_is_missing(write(tmp_path / "alone", FILES[:2])) is None  # `save_only_model`
    checkpoint = write(tmp_path / "checkpoint-2")
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert what_is_missing(checkpoint) == "`model-2.safetensors` is missing"
    save_file({"v": torch.ones(9)}, checkpoint / "model-2.safetensors")
    assert what_is_missing(checkpoint) is None
    (checkpoint / "ref").mkdir()
    (checkpoint / "ref" / "adapter_model.safetensors").write_text("half")
    assert what_is_missing(checkpoint) == "`ref/adapter_model.safetensors` is cut short"


def test_the_newest_whole_one_is_taken_and_newer_ones_are_named(tmp_path, caplog):
    for step in (2, 10, 4):
        write(tmp_path / f"checkpoint-{step}")
    assert [c.name for c in checkpoints_of(tmp_path)] == ["checkpoint-10", "checkpoint-4", "checkpoint-2"]
    assert all(checkpoint_to_resume(none, tmp_path) is None for none in (None, False, "false", ""))
    assert checkpoint_to_resume("LATEST", tmp_path) == str(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(True, tmp_path) == str(tmp_path / "checkpoint-4")
    assert "checkpoint-10, which is incomplete: `optimizer.pt` is missing" in caplog.text
    assert checkpoint_to_resume(str(tmp_path / "checkpoint-2"), tmp_path) == str(tmp_path / "checkpoint-2")
    for name, why in {"checkpoint-10": "`optimizer.pt` is missing", "checkpoint-8": "there is no such folder"}.items():
        with pytest.raises(ValueError, match=f"{name}` is no complete checkpoint: {why}"):
            checkpoint_to_resume(str(tmp_path / name), tmp_path)
    with pytest.raises(ValueError, match=r"there is no complete checkpoint in .* to begin from the start"):
        checkpoint_to_resume("true", tmp_path / "nowhere")


def test_a_pickle_in_a_checkpoint_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    checkpoint = write(tmp_path / "checkpoint-2")
    torch.save(Bomb(), checkpoint / "optimizer.pt")
    assert what_is_missing(checkpoint) is None
    assert not (tmp_path / "executed").exists()


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
    resumed = make(trl_padfix, tmp_path / "run")
    resumed.train(resume_from_checkpoint="latest")
    assert resumed._initial_global_step == 2
    assert not (tmp_path / "run" / BESIDE).exists()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_in_trl_the_half_is_in_its_place(tmp_path, monkeypatch):
    """The control: what the test above sees broken off is there, by its name, where Trainer writes it."""

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save_rng_state", broken)
    with pytest.raises(KeyboardInterrupt):
        make(trl, tmp_path).train()
    assert what_is_missing(tmp_path / "checkpoint-1") == "`trainer_state.json` is missing"


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


def test_an_upload_begins_once_and_when_the_checkpoint_is_in_its_place(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: seen.append(what_is_missing(folder)))
    trainer = make(trl_padfix, tmp_path, max_steps=2)
    trainer.args.push_to_hub = True
    monkeypatch.setattr(type(trainer), "init_hf_repo", lambda *args, **kwargs: None)
    monkeypatch.setattr(type(trainer), "push_to_hub", lambda *args, **kwargs: None)
    trainer.train()
    assert seen == [None, None]
