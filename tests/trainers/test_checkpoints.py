"""Whole checkpoints are distinguished from half-written ones, and a run resumes from the newest whole one."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import save_file
from trl import DPOConfig

from trl_padfix.trainers.checkpoints.checkpoints import checkpoint_to_resume, checkpoints_of, what_is_missing


def write(folder, **settings):
    """A checkpoint as `Trainer` writes it."""
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    save_file({"w": torch.ones(100)}, folder / "model.safetensors")
    config = DPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **settings)
    torch.save(config, folder / "training_args.bin")
    if not settings.get("save_only_model"):
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({"state": torch.ones(100)}, folder / name)
    return folder


FILES = ["trainer_state.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_and_a_truncated_file_are_named(name, tmp_path):
    checkpoint = write(tmp_path / "checkpoint-2")
    assert what_is_missing(checkpoint) is None
    file = checkpoint / name
    whole = file.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert what_is_missing(checkpoint) == f"`{name}` is cut short"
    file.unlink()
    assert what_is_missing(checkpoint) == f"`{name}` is missing"
    file.write_bytes(whole)
    assert what_is_missing(checkpoint) is None


def test_shards_and_adapters_are_looked_at_too(tmp_path):
    checkpoint = write(tmp_path / "checkpoint-2")
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert what_is_missing(checkpoint) == "`model-00002-of-00002.safetensors` is missing"
    save_file({"v": torch.ones(9)}, checkpoint / "model-00002-of-00002.safetensors")
    assert what_is_missing(checkpoint) is None
    (checkpoint / "ref").mkdir()
    (checkpoint / "ref" / "adapter_model.safetensors").write_text("half")
    assert what_is_missing(checkpoint) == "`ref/adapter_model.safetensors` is cut short"


def test_a_training_that_saves_only_its_model_has_no_optimizer(tmp_path):
    assert what_is_missing(write(tmp_path / "checkpoint-2", save_only_model=True)) is None
    checkpoint = write(tmp_path / "checkpoint-4", save_only_model=False)
    (checkpoint / "optimizer.pt").unlink()
    assert what_is_missing(checkpoint) == "`optimizer.pt` is missing"


@pytest.mark.parametrize("asked", ["true", "True", True, "latest", "LATEST"])
def test_the_newest_whole_one_is_taken_and_newer_ones_are_named(asked, tmp_path, caplog):
    for step in (2, 10, 4):
        write(tmp_path / f"checkpoint-{step}")
    assert [c.name for c in checkpoints_of(tmp_path)] == ["checkpoint-10", "checkpoint-4", "checkpoint-2"]
    assert checkpoint_to_resume(asked, tmp_path) == str(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-10" / "optimizer.pt").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_to_resume(asked, tmp_path) == str(tmp_path / "checkpoint-4")
    assert "checkpoint-10, which is half-written (`optimizer.pt` is missing)" in caplog.text


@pytest.mark.parametrize("asked", [None, False, "false", "False", "", "none"])
def test_and_none_where_none_is_asked_for(asked, tmp_path):
    write(tmp_path / "checkpoint-2")
    assert checkpoint_to_resume(asked, tmp_path) is None


def test_without_a_whole_one_the_error_says_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"there is no whole checkpoint in .* to begin from the start"):
        checkpoint_to_resume("true", tmp_path / "nowhere")
    shutil.rmtree(write(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(
        ValueError, match=r"only .*checkpoint-2, which is half-written \(`trainer_state.json` is missing"
    ):
        checkpoint_to_resume("latest", tmp_path)


def test_a_saved_model_is_no_half_written_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"a saved model and no state of a training.*model_name_or_path={tmp_path}"):
        checkpoint_to_resume(str(tmp_path), tmp_path)
    (tmp_path / "optimizer.pt").touch()  # of a checkpoint
    with pytest.raises(ValueError, match=r"half-written \(`trainer_state.json` is missing\)"):
        checkpoint_to_resume(str(tmp_path), tmp_path)


def test_a_path_is_taken_as_it_is_or_refused_with_the_newest_whole_one(tmp_path):
    whole, half = write(tmp_path / "checkpoint-2"), write(tmp_path / "checkpoint-4")
    assert checkpoint_to_resume(str(whole), tmp_path) == str(whole)
    (half / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match=r"half-written \(`scheduler.pt` is missing\).*checkpoint-2"):
        checkpoint_to_resume(str(half), tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        checkpoint_to_resume(str(tmp_path / "checkpoint-8"), tmp_path)


def test_a_pickle_in_a_checkpoint_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    checkpoint = write(tmp_path / "checkpoint-2")
    for name in ("optimizer.pt", "training_args.bin"):
        torch.save(Bomb(), checkpoint / name)
    assert what_is_missing(checkpoint) is None
    assert not (tmp_path / "executed").exists()


def test_shards_without_their_metadata_are_not_all_there(tmp_path):
    checkpoint = write(tmp_path / "checkpoint-2")
    (checkpoint / "optimizer.pt").unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (checkpoint / name).mkdir()
        (checkpoint / name / "__0_0.distcp").touch()
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").touch()
    assert what_is_missing(checkpoint) == "`optimizer_0/.metadata` is missing"
    (checkpoint / "optimizer_0" / ".metadata").touch()
    assert what_is_missing(checkpoint) is None
