"""Checkpoints are TRL's: its files, written by its code; a run goes on from the newest one that was finished."""

import logging

import pytest
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import build_pairs

import trl_padfix
from trl_padfix.trainers.resume import checkpoint_to_resume


def make(library, folder, kind="SFT", trainer_class=None, **given):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    build = build_pairs if kind == "DPO" else build_rows
    rows = {"train_dataset": build(16), "eval_dataset": build(4, seed=1), "per_device_train_batch_size": 8}
    return make_trainer(library, kind, folder, trainer_class=trainer_class, **rows | settings | given)


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
