"""The import alone changes nothing: side, callbacks, random numbers. `test_every_method.py` has the figures."""

import random

import torch
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import SETTINGS, build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import trl_padfix


def test_states_that_run_over_padding_keep_the_side_of_trl(tmp_path):
    """A tokenizer that pads left, and a model that is not exact on that side: TRL pads right, and so do we."""

    def losses(library, **config):
        torch.manual_seed(0)
        shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", attention_hidden_size=32, **shape))
        tokenizer = build_tokenizer(padding_side="left")
        model.resize_token_embeddings(len(tokenizer))
        args = library.SFTConfig(
            str(tmp_path), **SETTINGS | dict(max_steps=2, per_device_train_batch_size=4, logging_steps=1) | config
        )
        trainer = library.SFTTrainer(model, args, train_dataset=build_rows(8), processing_class=tokenizer)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    theirs = losses(trl)
    assert losses(trl_padfix) == theirs
    assert losses(trl_padfix, padding_side="left") != theirs


# What a trainer changes on others, it undoes


def test_restore_padding_gives_the_callbacks_back(tmp_path):
    trainer = make_trainer(trl_padfix, "SFT", tmp_path)
    assert "call_event" in vars(trainer.callback_handler)
    trainer.restore_padding()
    assert "call_event" not in vars(trainer.callback_handler)
    trainer.restore_padding()  # twice does no harm


def test_making_a_trainer_draws_no_random_numbers(tmp_path):
    states = []
    for trainers in (trl, trl_padfix):
        make_trainer(trainers, "SFT", tmp_path, args=trl.SFTConfig(str(tmp_path), **SETTINGS))
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]
