"""Tokens that are counted: in the progress bar, in the log, and with `prefix_sharing="auto"`."""

import pytest
import torch
from datasets import Dataset
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import MODES, assert_same, run, watch_inputs
from transformers import ProgressCallback

import trl_padfix


TEXTS = ["w3 w4 w5 w6 w7 w8 w9 w10", "w3 w4", "w3 w4 w5 w6 w7 w8 w9 w11", "w3 w4 w12"]


@pytest.mark.parametrize("mode", ["padding-free", "prefix sharing"])
def test_the_bar_shows_tokens_a_second_and_what_is_not_computed(mode, tmp_path, monkeypatch):
    said = []

    def set_up(self, args, state, control, **kwargs):
        begin(self, args, state, control, **kwargs)
        monkeypatch.setattr(self.training_bar, "set_postfix_str", said.append)

    begin = ProgressCallback.on_train_begin
    monkeypatch.setattr(ProgressCallback, "on_train_begin", set_up)
    given = {"max_steps": 2, "disable_tqdm": False, "per_device_train_batch_size": 4}
    data = Dataset.from_dict({"text": TEXTS})
    trainer = make_trainer(trl_padfix, "SFT", tmp_path, train_dataset=data, **given | MODES[mode])
    trainer.train()
    lengths = torch.tensor([len(trainer.processing_class(text)["input_ids"]) + 1 for text in TEXTS])  # and the end
    computed = {"padding-free": int(lengths.sum()), "prefix sharing": 9 + 1 + 2 + 2}[mode]
    assert len(said) == 2
    for text in said:
        number, _, rest = text.partition(" tokens/s")
        assert int(number.replace(",", "")) > 0
        assert rest == f", {1 - computed / (4 * int(lengths.max())):.0%} of the batch not computed"


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


def test_auto_leaves_noisy_rows_apart(tmp_path):
    found = training(tmp_path, padding_free=True, prefix_sharing="auto", neftune_noise_alpha=5.0)
    assert found.entered == found.counts()["padding-free"]
    assert torch.isfinite(found.trajectory()).all()
