"""`prefix_sharing="auto"`: the numbers of both modes, and a metric that says what was done."""

import torch
from kit.sft_runs import build_rows
from kit.trainer_runs import SETTINGS, assert_same, build_model, build_tokenizer, run, watch_inputs

from trl_padfix import SFTConfig, SFTTrainer


def trained(path, rows, **more):
    args = SFTConfig(output_dir=str(path), **SETTINGS | {"max_steps": 3, "learning_rate": 1e-2}, **more)
    trainer = SFTTrainer(build_model(), args, train_dataset=rows, processing_class=build_tokenizer())
    return run(trainer, watch_inputs(""))


def test_auto_follows_the_counts_of_each_batch(tmp_path):
    rows = build_rows(24)
    padded = trained(tmp_path, rows)
    for sharing in ("auto", True):
        found = trained(tmp_path, rows, padding_free=True, prefix_sharing=sharing)
        assert_same(found.trajectory(), padded.trajectory())
        assert found.entered == found.counts()["prefix sharing"] < found.counts()["padding-free"]
        shares = [log["padfix/auto_shared"] for log in found.logs if "padfix/auto_shared" in log]
        assert shares == ([1.0] * 3 if sharing == "auto" else [])


def test_auto_leaves_noisy_rows_apart(tmp_path):
    found = trained(tmp_path, build_rows(24), padding_free=True, prefix_sharing="auto", neftune_noise_alpha=5.0)
    assert found.entered == found.counts()["padding-free"]
    assert torch.isfinite(found.trajectory()).all()
