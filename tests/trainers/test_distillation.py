"""TRL's `DistillationTrainer` and ours: one trajectory, generation included, whatever the mode."""

from functools import cache

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.online_runs import ONLINE_SETTINGS, build_prompts, load_policy, save_policy, without_groups
from kit.trainer_runs import (
    MODES,
    Run,
    assert_mode_ran,
    assert_same,
    break_mode,
    build_model,
    build_tokenizer,
    lora,
    run,
    watch_decoder,
)

import trl_padfix
from trl_padfix import ParityError


if not hasattr(trl, "DistillationTrainer"):
    pytest.skip("this TRL has no stable distillation", allow_module_level=True)

METRICS = ("entropy", "completions/mean_length", "num_tokens")
PACKED = ["padding-free", "prefix sharing"]
SHORT = {"max_steps": 4}
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
BUDGET = {"max_tokens_per_batch": 48}
"""Only our configuration has it."""

CASES = {
    "plain": ({}, dict),
    "accumulation": (SHORT | SCATTERED, dict),
    "budget": (SHORT | SCATTERED, dict),
    "checkpointing": (SHORT | {"gradient_checkpointing": True}, dict),
    "forward divergence, colder": (SHORT | {"beta": 0.0, "temperature": 0.7, "pad_to_multiple_of": 8}, dict),
    "lora": (SHORT, lambda: {"peft_config": lora(task_type="CAUSAL_LM")}),
    "a wider teacher": (SHORT, lambda: {"teacher_model": build_model(seed=1, hidden_size=64, initializer_range=0.1)}),
}


def build_data(count: int, seed: int = 0):
    """Prompts that begin alike."""
    return build_prompts(count, seed).map(lambda row: {"prompt": f"w3 w5 w7 w9 {row['prompt']}"})


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    student = save_policy(tmp_path_factory.mktemp("student"))

    def make_trainer(library=trl_padfix, config=None, **given):
        settings = without_groups(ONLINE_SETTINGS) | {"output_dir": str(tmp_path_factory.mktemp("run"))}
        defaults = {
            "model": lambda: load_policy(student),
            "teacher_model": lambda: build_model(seed=1),
            "train_dataset": lambda: build_data(24),
            "eval_dataset": lambda: build_data(4, seed=1),
            "processing_class": build_tokenizer,
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", library.DistillationConfig(**settings | (config or {})))
        return library.DistillationTrainer(**given)

    return make_trainer


def train(make, case: str, library=trl_padfix, **config) -> Run:
    settings, given = CASES[case]
    return run(make(library, settings | config, **given()), watch_decoder if library is trl else lambda *_: None)


@pytest.fixture(scope="module")
def trl_run(make):
    return cache(lambda case: train(make, case, trl))


@pytest.mark.parametrize("mode", slow_but(["prefix sharing"], MODES))
def test_ten_steps_and_an_evaluation_are_trls(mode, make, trl_run):
    ours, theirs = train(make, "plain", **MODES[mode]), trl_run("plain")
    assert len(ours.trajectory()) == 11
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert_same(ours.weights(), theirs.weights(), atol=1e-5)
    assert_mode_ran(Run(ours.trainer, [], ours.entered, theirs.batches), mode)
    handles, reports = ours.trainer.padding.handles, ours.trainer.padding.parity
    if mode != "padded":  # the teacher's forwards are as many, on the same tokens
        assert handles[1].stats.packed_tokens == handles[0].stats.packed_tokens < handles[0].stats.padded_tokens
        assert [len(reports[of]) for of in ("train", "eval")] == [2, 2]


@pytest.mark.parametrize(
    ("case", "mode"),
    slow_but([("budget", "prefix sharing")], [(c, m) for c in CASES if c != "plain" for m in PACKED]),
)
def test_every_set_up_is_trls(case, mode, make, trl_run):
    ours = train(make, case, **MODES[mode] | (BUDGET if case == "budget" else {}))
    # The mean entropy is over the tokens of a forward, and micro-batches hold other rows where prompts are grouped.
    metrics = METRICS if case not in ("accumulation", "budget") else METRICS[1:]
    assert_same(ours.trajectory(*metrics), trl_run(case).trajectory(*metrics))
    assert_same(ours.weights(), trl_run(case).weights(), atol=1e-5)
    if case == "budget":
        assert ours.trainer.args.gradient_accumulation_steps == 1
        assert ours.entered > train(make, "accumulation", **MODES[mode]).entered  # some pieces are computed twice
    else:
        assert ours.entered < trl_run(case).entered


@pytest.mark.parametrize("mode", slow_but(["prefix sharing"], PACKED))
def test_a_leaking_layout_does_not_give_trls_trajectory(mode, make, trl_run, monkeypatch):
    config = break_mode(monkeypatch, mode)
    trainer = make(config=config)
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert trainer.state.global_step == 0
    ours = train(make, "plain", parity_check=False, **config)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(*METRICS), trl_run("plain").trajectory(*METRICS))


@pytest.mark.slow
def test_fractions_are_logged_and_a_plain_configuration_of_trl_is_taken(make, tmp_path, trl_run):
    logs = train(make, "plain", **MODES["prefix sharing"], max_steps=2).logs
    assert all(0 < log["padfix/pad_fraction"] < 1 and 0 < log["padfix/shared_fraction"] < 1 for log in logs[:2])
    assert any("eval_perf/tokens_per_second" in log for log in logs)
    args = trl.DistillationConfig(output_dir=str(tmp_path), **without_groups(ONLINE_SETTINGS))
    assert_same(run(make(args=args), lambda *_: None).trajectory(), trl_run("plain").trajectory())


# Attention


@pytest.mark.slow
def test_student_and_teacher_run_with_what_they_are_asked_to(make, trl_run):
    attention = {"attn_implementation": "eager", "teacher_attn_implementation": "sdpa"}
    ours = train(make, "plain", **MODES["padding-free"], **attention)
    implementations = [m.config._attn_implementation for m in (ours.trainer.model, ours.trainer.teacher_model)]
    assert implementations == ["eager", "sdpa"]
    assert_same(ours.trajectory(), trl_run("plain").trajectory())


def test_a_teacher_that_is_loaded_by_its_name_runs_with_what_it_is_asked_to(make, tmp_path):
    path = save_policy(tmp_path / "teacher", seed=1)
    trainer = make(config={"teacher_attn_implementation": "eager"}, teacher_model=path)
    assert trainer.teacher_model.config._attn_implementation == "eager"
    assert trainer.model.config._attn_implementation == "sdpa"


# Bad input


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({}, {"teacher_model": None}, "The student needs a teacher, and `teacher_model` is not given"),
        (
            {"teacher_attn_implementation": "eager"},
            {"teacher_model": None},
            "`teacher_attn_implementation='eager'` is for a teacher model",
        ),
        (
            {"teacher_attn_implementation": "eager", "teacher_model_init_kwargs": {"attn_implementation": "sdpa"}},
            {},
            r"`teacher_attn_implementation='eager'` and `teacher_model_init_kwargs=.*disagree",
        ),
        ({"padding_free": True, "max_tokens_per_batch": 8}, {}, "Raise the budget to 12"),
        ({}, {"train_dataset": build_prompts(4).rename_column("prompt", "question")}, "no column 'prompt'; it has"),
        ({}, {"teacher_model": build_model(vocab_size=44)}, "vocab_size"),
    ],
)
def test_what_cannot_be_distilled_is_refused(config, given, message, make):
    with pytest.raises(ValueError, match=message):
        make(config=config, **given)


def test_a_teacher_that_cannot_be_packed_is_refused(make):
    class Wrapper(torch.nn.Module):
        pretrained_model = None

    with pytest.raises(TypeError, match="has no `config`"):
        make(config=MODES["padding-free"], teacher_model=Wrapper())
