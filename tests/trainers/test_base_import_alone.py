"""
The import alone changes nothing: with none of our fields set, every figure that TRL logs is TRL's, to the bit.

Ten steps and an evaluation over several batches, the last of them ragged, on the tokenizer's right side.
"""

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import trl
from kit.cells import every_second, once_each, slow_but
from kit.methods import DEFAULTS, make_trainer
from kit.online_runs import load_policy, save_policy
from kit.rows import build_prompts, build_rows
from kit.trainer_runs import SETTINGS, build_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

import trl_padfix
from trl_padfix.trainers.parts.packing import RemovePadding


STEPS = 10
ONLINE = ["GRPO", "RLOO", *(["Distillation"] if hasattr(trl, "DistillationTrainer") else [])]
KINDS = ["DPO", "SFT", "Reward", "KTO", *ONLINE]
CLOCK = {"runtime", "samples_per_second", "steps_per_second", "step_time"}
"""Ends of the names of figures that depend on the clock."""


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Trains and evaluates; returns all that was logged, but for the clock and our own metrics."""
    policy = save_policy(tmp_path_factory.mktemp("policy"))

    @cache
    def run(kind, trainers, configs, **config):
        if kind in ONLINE:
            given = {"model": load_policy(policy), "eval_dataset": build_prompts(5, seed=1)}
        else:
            train, evaluation = (DEFAULTS[kind][name]() for name in ("train_dataset", "eval_dataset"))
            given = {"train_dataset": train.select(range(25)), "eval_dataset": evaluation.select(range(7))}
            given |= {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 4, "max_length": 26}
        library = SimpleNamespace(**{f"{kind}Trainer": getattr(trainers, f"{kind}Trainer")})
        setattr(library, f"{kind}Config", getattr(configs, f"{kind}Config"))
        trainer = make_trainer(library, kind, tmp_path_factory.mktemp("run"), **given | {"max_steps": STEPS} | config)
        trainer.train()
        trainer.evaluate()
        return [
            {name: value for name, value in log.items() if not ours(name) and name.split("/")[0] != "profiling"}
            for log in trainer.state.log_history
        ]

    return run


def ours(name: str) -> bool:
    name = name.removeprefix("eval_").removeprefix("train_")
    return name.startswith(("perf/", "padfix/")) or name in CLOCK


@pytest.mark.parametrize(("kind", "configs"), every_second(once_each(KINDS, ["trl", "trl_padfix"], fully=["DPO"])))
def test_every_figure_is_trls_to_the_bit(kind, configs, logged):
    expected, got = logged(kind, trl, trl), logged(kind, trl_padfix, {"trl": trl, "trl_padfix": trl_padfix}[configs])
    assert len([log for log in expected if "loss" in log]) == STEPS
    assert {"eval_loss", "eval_num_tokens"} <= set(expected[-1])
    assert [set(log) for log in got] == [set(log) for log in expected]
    # NaN is what TRL logs where there is nothing to average.
    assert [{n: v for n, v in log.items() if v == v} for log in got] == [
        {n: v for n, v in log.items() if v == v} for log in expected
    ]


@pytest.mark.parametrize("kind", slow_but(["DPO", "GRPO"], KINDS))
def test_another_learning_rate_does_not_pass(kind, logged):
    assert logged(kind, trl_padfix, trl_padfix, learning_rate=1.001e-3) != logged(kind, trl, trl)


STATEFUL = {
    "recurrent_gemma": dict(
        lru_width=32, attention_window_size=16, head_dim=8, block_types=["recurrent", "attention"]
    ),
    "rwkv": dict(attention_hidden_size=32),
}


@pytest.mark.parametrize("family", STATEFUL)
def test_states_that_run_over_padding_keep_the_side_of_trl(family, tmp_path):
    """A tokenizer that pads left, and a model that is not exact on that side: TRL pads right, and so do we."""

    def losses(library, **config):
        torch.manual_seed(0)
        shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape | STATEFUL[family]))
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


class Watching(TrainerCallback):
    pass


def test_restore_padding_gives_the_callbacks_back(tmp_path):
    trainer = make_trainer(trl_padfix, "SFT", tmp_path)
    assert "call_event" in vars(trainer.callback_handler)
    trainer.restore_padding()
    assert "call_event" not in vars(trainer.callback_handler)
    trainer.restore_padding()  # twice does no harm


def test_an_error_while_the_trainer_is_made_gives_the_callbacks_back(tmp_path, monkeypatch):
    handlers = []
    ready = RemovePadding.on_init_end

    def fail_after(part):
        ready(part)
        handlers.append(part.trainer.callback_handler)
        assert "call_event" in vars(handlers[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(RemovePadding, "on_init_end", fail_after)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(trl_padfix, "SFT", tmp_path)
    assert "call_event" not in vars(handlers[0])


def test_making_a_trainer_draws_no_random_numbers(tmp_path):
    states = []
    for trainers in (trl, trl_padfix):
        make_trainer(trainers, "SFT", tmp_path, args=trl.SFTConfig(str(tmp_path), **SETTINGS))
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]
