"""`TRL_PADFIX_OFF=1` computes the steps of TRL and says so; a checkpoint opens where this package is not installed."""

import logging
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import trl
from kit.methods import make_trainer
from kit.trainer_runs import build_model
from transformers import BertConfig, BertModel

import trl_padfix
from trl_padfix import PaddingRemovalError, remove_padding


OURS = {"padding_free": True, "prefix_sharing": True, "max_tokens_per_batch": 60}
TRAINED = {"max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def trained(library, folder, **given):
    trainer = make_trainer(library, "DPO", folder, **TRAINED | given)
    trainer.train()
    return trainer, [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def test_off_is_trl_bit_for_bit_and_says_so(tmp_path, monkeypatch, caplog):
    _, theirs = trained(trl, tmp_path)
    on, ours = trained(trl_padfix, tmp_path, **OURS)
    assert on.padding.stats.packed_tokens > 0
    assert ours != theirs  # the same to rounding, and not bit for bit: the mode ran
    monkeypatch.setenv("TRL_PADFIX_OFF", "1")
    with caplog.at_level(logging.WARNING, logger="trl_padfix"):
        off, same = trained(trl_padfix, tmp_path, **OURS)
    assert same == theirs
    assert not off.padding.handles
    assert off.padding.stats.pad_fraction == 0
    assert any("TRL_PADFIX_OFF is set" in text for text in caplog.messages)


@pytest.mark.parametrize("kind", ["SFT", "Reward"])
def test_a_configuration_made_before_it_is_set_packs_after_it_is_unset(kind, tmp_path, monkeypatch):
    args = make_trainer(trl_padfix, kind, tmp_path, padding_free=True, **TRAINED).args
    for off in ("1", "", "1"):
        monkeypatch.setenv("TRL_PADFIX_OFF", off)
        trainer = make_trainer(trl_padfix, kind, tmp_path, args=args)
        trainer.train()
        assert (trainer.padding.stats.packed_tokens > 0) is not bool(off)


def test_a_model_is_left_as_it_is(monkeypatch):
    model, ids = build_model().eval(), torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
    copied, encoder = build_model(), BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    copied.forward = model.forward  # as in a deep copy of a model that TRL gave a head
    for value, packs in (("1", False), ("0", True), ("", True)):
        monkeypatch.setenv("TRL_PADFIX_OFF", value)
        with remove_padding(model) as handle:
            model(ids, attention_mask=(ids != 0).long())
            assert ("off by TRL_PADFIX_OFF" in repr(handle)) is not packs
        assert (handle.stats.packed_tokens > 0) == packs
        with pytest.raises(PaddingRemovalError) if packs else nullcontext():
            remove_padding(encoder)
        remove_padding(copied).remove()
        assert ("forward" in vars(copied)) != packs


OPENS = """
import sys
sys.modules["trl_padfix"] = None  # not installed
import torch
args = torch.load(sys.argv[1], weights_only=False)
print(type(args).__module__, type(args).__name__, args.learning_rate, hasattr(args, "prefix_sharing"))
"""


@pytest.mark.slow
def test_training_args_open_where_this_package_is_not_installed(tmp_path):
    trainer = make_trainer(trl_padfix, "DPO", tmp_path, padding_free=True, prefix_sharing=True, learning_rate=0.25)
    trainer.save_model(str(tmp_path / "saved"))
    path = str(tmp_path / "saved" / "training_args.bin")
    done = subprocess.run([sys.executable, "-c", OPENS, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["trl.trainer.dpo_config", "DPOConfig", "0.25", "False"]
    # Negative control: the configuration itself needs the package.
    torch.save(trainer.args, path)
    assert isinstance(trainer.args, trl_padfix.DPOConfig)
    assert subprocess.run([sys.executable, "-c", OPENS, path], capture_output=True).returncode != 0
