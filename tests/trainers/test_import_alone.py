"""
The import alone changes nothing: with none of our fields set, every figure that TRL logs is TRL's, to the bit.

Ten steps and an evaluation over several batches, the last of them ragged, on the tokenizer's right side.
"""

import random
from functools import cache

import pytest
import torch
import trl
from datasets import Dataset
from kit.cells import every_second, once_each, slow_but
from kit.online_runs import ONLINE_SETTINGS, build_prompts, load_policy, reward_words, save_policy, without_groups
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer, words
from transformers import PrinterCallback, TrainerCallback

import trl_padfix
from trl_padfix.trainers.packing import Packing


STEPS = 10
ONLINE = ["GRPO", "RLOO", *(["Distillation"] if hasattr(trl, "DistillationTrainer") else [])]
KINDS = ["DPO", "SFT", "Reward", "KTO", *ONLINE]
CLOCK = {"runtime", "samples_per_second", "steps_per_second", "step_time"}
"""Ends of the names of figures that depend on the clock."""


def build_data(kind: str, count: int, seed: int) -> Dataset:
    draw = random.Random(seed)
    if kind == "SFT":
        return Dataset.from_list([{"text": words(draw, 1, 24)} for _ in range(count)])
    prompts = [words(draw, 2, 18) for _ in range(count)]
    parts = ("completion",) if kind == "KTO" else ("chosen", "rejected")
    rows = [{"prompt": prompt, **{part: words(draw, 1, 12) for part in parts}} for prompt in prompts]
    return Dataset.from_list([row | ({"label": i % 3 > 0} if kind == "KTO" else {}) for i, row in enumerate(rows)])


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Trains and evaluates; returns all that was logged, but for the clock and our own metrics."""
    policy = save_policy(tmp_path_factory.mktemp("policy"))

    @cache
    def run(kind, trainers, configs, **config):
        if kind in ONLINE:
            settings, given = ONLINE_SETTINGS, {"reward_funcs": reward_words, "model": load_policy(policy)}
            if kind == "Distillation":
                settings = without_groups(settings)
                given = {"model": given["model"], "teacher_model": build_model(seed=1)}
            given |= {"train_dataset": build_prompts(24), "eval_dataset": build_prompts(5, seed=1)}
        else:
            settings = SETTINGS | {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 4, "max_length": 26}
            given = {"model": build_model("reward" if kind == "Reward" else "causal")}
            given |= {"train_dataset": build_data(kind, 25, 0), "eval_dataset": build_data(kind, 11, 1)}
            given |= {"ref_model": build_model(seed=1)} if kind in ("DPO", "KTO") else {}
        settings = settings | {"max_steps": STEPS, "output_dir": str(tmp_path_factory.mktemp("run"))} | config
        trainer = getattr(trainers, f"{kind}Trainer")(
            **given, args=getattr(configs, f"{kind}Config")(**settings), processing_class=build_tokenizer()
        )
        trainer.remove_callback(PrinterCallback)
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


@pytest.mark.parametrize("kind", ["DPO", "SFT"])
def test_exact_means_of_ragged_batches_are_others(kind, logged):
    exact, theirs = logged(kind, trl_padfix, trl_padfix, exact_eval_means=True), logged(kind, trl, trl)
    assert exact[:-1] == theirs[:-1]
    assert exact[-1]["eval_loss"] != theirs[-1]["eval_loss"]
    assert exact[-1]["eval_loss"] == pytest.approx(theirs[-1]["eval_loss"], rel=0.2)


# What a trainer changes on others, it undoes


class Watching(TrainerCallback):
    pass


def make_sft(tmp_path, **given):
    args = trl_padfix.SFTConfig(str(tmp_path), **SETTINGS)
    given = {"model": build_model(), "train_dataset": build_data("SFT", 4, 0)} | given
    return trl_padfix.SFTTrainer(args=args, processing_class=build_tokenizer(), **given)


def test_restore_padding_gives_the_callbacks_back(tmp_path):
    trainer = make_sft(tmp_path)
    assert "call_event" in vars(trainer.callback_handler)
    trainer.restore_padding()
    assert "call_event" not in vars(trainer.callback_handler)
    trainer.restore_padding()  # twice does no harm


def test_an_error_while_the_trainer_is_made_gives_the_callbacks_back(tmp_path, monkeypatch):
    handlers = []
    ready = Packing.ready

    def fail_after(part):
        ready(part)
        handlers.append(part.trainer.callback_handler)
        assert "call_event" in vars(handlers[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(Packing, "ready", fail_after)
    with pytest.raises(KeyboardInterrupt):
        make_sft(tmp_path)
    assert "call_event" not in vars(handlers[0])


def test_making_a_trainer_draws_no_random_numbers(tmp_path):
    states = []
    for trainers in (trl, trl_padfix):
        trainers.SFTTrainer(
            model=build_model(),
            args=trl.SFTConfig(str(tmp_path), **SETTINGS),
            train_dataset=build_data("SFT", 4, 0),
            processing_class=build_tokenizer(),
        )
        states.append((torch.get_rng_state().tolist(), random.getstate()))
    assert states[0] == states[1]
