"""TRL's `RLOOTrainer` and ours: one trajectory, generation included, whatever the mode."""

from functools import cache

import pytest
import torch
import trl
from kit.cells import once_each
from kit.online_runs import (
    MODES,
    ONLINE_SETTINGS,
    admitted,
    build_prompts,
    load_policy,
    reward_words,
    save_policy,
    watch_forwards,
)
from kit.trainer_runs import Run, assert_mode_ran, assert_same, break_mode, build_tokenizer, lora, run

from trl_padfix import ParityError, RLOOConfig, RLOOTrainer


METRICS = ("reward", "reward_std", "kl", "entropy", "completions/mean_length", "num_tokens")
PACKED = ["padding-free", "prefix sharing"]

SHORT = {"max_steps": 4}
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
CASES = {
    "plain": ({}, dict),
    "accumulation": (SHORT | SCATTERED, dict),
    "two iterations": (SHORT | SCATTERED | {"num_iterations": 2}, dict),
    "truncated completions masked": (SHORT | {"mask_truncated_completions": True}, dict),
    "checkpointing": (SHORT | {"gradient_checkpointing": True}, dict),
    "normalised advantages": (SHORT | {"normalize_advantages": True, "beta": 0.0}, dict),
    "lora": (SHORT, lambda: {"peft_config": lora(task_type="CAUSAL_LM")}),
}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    policy = save_policy(tmp_path_factory.mktemp("policy"))

    def make_trainer(trainer_class=RLOOTrainer, config=None, **given):
        config_class = RLOOConfig if issubclass(trainer_class, RLOOTrainer) else trl.RLOOConfig
        settings = ONLINE_SETTINGS | {"output_dir": str(tmp_path_factory.mktemp("run"))}
        defaults = {
            "model": lambda: load_policy(policy),
            "train_dataset": lambda: build_prompts(24),
            "eval_dataset": lambda: build_prompts(4, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", config_class(**admitted(config_class, settings | (config or {}))))
        torch.manual_seed(0)  # some versions of TRL draw adapters without a seed
        return trainer_class(reward_funcs=reward_words, **given)

    return make_trainer


def train(make, case: str, trainer_class=RLOOTrainer, **config) -> tuple[Run, list[list[int]]]:
    settings, given = CASES[case]
    completions: list[list[int]] = []
    return run(make(trainer_class, settings | config, **given()), watch_forwards(completions)), completions


@pytest.fixture(scope="module")
def trl_run(make):
    return cache(lambda case: train(make, case, trl.RLOOTrainer))


@pytest.mark.parametrize("mode", MODES)
def test_ten_steps_and_an_evaluation_are_trls(mode, make, trl_run):
    (ours, completions), (theirs, their_completions) = train(make, "plain", **MODES[mode]), trl_run("plain")
    assert len(ours.trajectory()) == 11
    assert completions == their_completions
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert_mode_ran(ours, mode)


@pytest.mark.parametrize(("case", "mode"), once_each([case for case in CASES if case != "plain"], PACKED))
def test_every_set_up_is_trls(case, mode, make, trl_run):
    (ours, completions), (theirs, their_completions) = train(make, case, **MODES[mode]), trl_run(case)
    # Means over micro-batches differ where these hold other rows.
    left_out = {"entropy"} if ours.trainer.padding.task.may_group() else set()
    left_out |= {"kl"} if case == "normalised advantages" else set()
    metrics = [name for name in METRICS if name not in left_out]
    assert completions == their_completions
    # Norms of gradients that nearly cancel, after a step on the same completions, keep the rounding of the large ones.
    atol = 2e-5 if case == "two iterations" else 1e-6
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics), atol=atol)
    if case not in ("checkpointing", "lora"):  # layers run twice, or for the reference too
        assert_mode_ran(ours, mode)
    assert ours.entered < theirs.entered


def test_accumulation_does_not_scatter_a_group(make, trl_run):
    ours, _ = train(make, "accumulation", **MODES["prefix sharing"])
    assert ours.entered < trl_run("accumulation")[0].counts()["prefix sharing"]


def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(make):
    ours, _ = train(make, "plain", max_steps=2)
    for mode in PACKED:
        with pytest.raises(AssertionError):
            assert_mode_ran(ours, mode)


@pytest.mark.parametrize("mode", PACKED)
def test_a_leaking_layout_does_not_give_trls_trajectory(mode, make, trl_run, monkeypatch):
    ours, _ = train(make, "plain", **break_mode(monkeypatch, mode), parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(*METRICS), trl_run("plain")[0].trajectory(*METRICS))


@pytest.mark.parametrize("mode", PACKED)
def test_a_leaking_layout_stops_training_and_evaluation(mode, make, monkeypatch):
    trainer = make(config=break_mode(monkeypatch, mode))
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.evaluate()


def test_fractions_are_logged(make):
    ours, _ = train(make, "plain", **MODES["prefix sharing"], max_steps=2)
    trained, evaluated = ours.logs[0], next(log for log in ours.logs if "eval_loss" in log)
    assert 0 < trained["padfix/pad_fraction"] < 1
    assert 0 < trained["padfix/shared_fraction"] < 1
    assert trained["perf/tokens_per_second"] > 0
    assert 0 < evaluated["eval_padfix/shared_fraction"] < 1


def test_a_plain_configuration_of_trl_is_taken(make, tmp_path, trl_run):
    trainer = make(args=trl.RLOOConfig(output_dir=str(tmp_path), **ONLINE_SETTINGS))
    assert_same(run(trainer, watch_forwards([])).trajectory(), trl_run("plain")[0].trajectory())


# Bad input


def test_prompts_without_a_token_are_refused(make):
    data = build_prompts(4).map(lambda row, i: {"prompt": "" if i == 1 else row["prompt"]}, with_indices=True)
    with pytest.raises(ValueError, match=r"have no token.*BOS"):
        make(train_dataset=data, config={"shuffle_dataset": False}).train()


def test_images_without_a_vision_model_are_refused(make):
    data = build_prompts(4).add_column("image", ["a.png"] * 4)
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM takes text only|vision"):
        make(config=MODES["padding-free"], train_dataset=data)
