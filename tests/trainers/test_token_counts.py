"""Tokens that are counted: in the progress bar, in the log, and with `prefix_sharing="auto"`."""

import pytest
import torch
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import assert_same, run, watch_inputs

import trl_padfix
from trl_padfix.core.errors import UnpackableCallError


# -- `prefix_sharing="auto"`


def training(path, **given):
    given = {"train_dataset": build_rows(24), "max_steps": 3, "learning_rate": 1e-2} | given
    return run(make_trainer(trl_padfix, "SFT", path, **given), watch_inputs(""))


def test_auto_follows_the_counts_of_each_batch(tmp_path):
    padded = training(tmp_path)
    for sharing in ("auto", True):
        found = training(tmp_path, padding_free=True, prefix_sharing=sharing)
        assert_same(found.trajectory(), padded.trajectory())
        assert found.entered == found.counts()["prefix sharing"] < found.counts()["padding-free"]
        shares = [log["padfix/auto_shared"] for log in found.logs if "padfix/auto_shared" in log]
        assert shares == ([1.0] * 3 if sharing == "auto" else [])


def test_tokens_are_those_of_the_batch_with_a_budget_too(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(
        "trl_padfix.trainers.metrics.token_counts.TokenCounter.add",
        lambda self, tokens, forwards, trainer: counted.append((int(tokens), forwards.padded_tokens)),
    )
    for budget in ({}, {"max_tokens_per_batch": 40}):
        training(tmp_path, padding_free=True, per_device_train_batch_size=8, **budget)
    assert counted[:3] == counted[3:]
    assert min(counted) > (40, 0)  # the budget splits


def test_a_batch_of_two_batches_counts_the_tokens_of_its_forwards(tmp_path):
    class TwoTasks(trl_padfix.SFTTrainer):
        def compute_loss(self, model, inputs, **given):
            return sum(model(**batch).loss for batch in inputs.values())

    def collate(rows):
        return {"first": collator(rows[:1]), "second": collator(rows[1:])}

    given = {"padding_free": True, "max_steps": 1, "train_dataset": build_rows(8)}
    collator = make_trainer(trl_padfix, "SFT", tmp_path, **given).data_collator
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, trainer_class=TwoTasks, data_collator=collate, **given)
    trainer.train()
    assert trainer.padding.stats.forwards == 2
    assert trainer.state.log_history[0]["perf/tokens_per_second"]


def test_forwards_of_one_row_get_advice(tmp_path, capsys):
    for size, steps, told in ((1, 4, 1), (1, 1, 0), (2, 4, 0)):
        training(tmp_path, padding_free=True, per_device_train_batch_size=size, gradient_accumulation_steps=steps)
        assert capsys.readouterr().out.count("per_device_train_batch_size=4") == told


def test_noisy_rows_stay_apart(tmp_path, caplog):
    noisy = {"padding_free": True, "neftune_noise_alpha": 5.0}
    for sharing, told in (("auto", 0), (True, 1)):
        found = training(tmp_path, prefix_sharing=sharing, **noisy)
        assert found.entered == found.counts()["padding-free"]
        assert torch.isfinite(found.trajectory()).all()
        assert caplog.text.count("`neftune_noise_alpha` gives each token of each row its own noise") == told
    with pytest.raises(UnpackableCallError, match=r"`neftune_noise_alpha`.*`prefix_sharing=False`"):
        training(tmp_path, prefix_sharing=True, strict=True, **noisy)
