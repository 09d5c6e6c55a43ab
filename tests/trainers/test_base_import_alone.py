"""The import alone changes nothing: side, callbacks, random numbers. `test_every_method.py` has the figures."""

import random

import torch
import trl
from kit.methods import make_trainer
from kit.rows import build_rows
from kit.trainer_runs import SETTINGS, build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

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


def test_the_side_that_a_callback_sets_stays(tmp_path):
    """Scripts set it in one event, and generate in another."""

    class Left(TrainerCallback):
        def on_train_begin(self, args, state, control, processing_class=None, **kwargs):
            processing_class.padding_side = "left"

    for library in (trl, trl_padfix):
        trainer = make_trainer(library, "SFT", tmp_path, max_steps=1, callbacks=[Left()])
        assert trainer.processing_class.padding_side == "right"
        trainer.train()
        assert trainer.processing_class.padding_side == "left"


def test_making_a_trainer_draws_no_random_numbers(tmp_path):
    states = []
    for trainers in (trl, trl_padfix):
        make_trainer(trainers, "SFT", tmp_path, args=trl.SFTConfig(str(tmp_path), **SETTINGS))
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]
