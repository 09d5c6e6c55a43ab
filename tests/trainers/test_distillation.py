"""What distillation has of its own: a teacher, and a budget. `test_every_method.py` has the trajectories."""

import pytest
import trl
from kit.cells import slow_but
from kit.online_runs import save_policy
from kit.trainer_runs import MODES, assert_same, build_model


if not hasattr(trl, "DistillationTrainer"):
    pytest.skip("this TRL has no stable distillation", allow_module_level=True)


@pytest.fixture(scope="module")
def make(makers):
    return makers("Distillation")


@pytest.mark.parametrize("mode", slow_but(["prefix sharing"], ["padding-free", "prefix sharing"]))
def test_a_step_in_parts_is_trls(mode, make):
    ours, theirs = make.train("accumulation", **MODES[mode], max_tokens_per_batch=48), make.theirs("accumulation")
    # The mean entropy is over the tokens of a forward, and micro-batches hold other rows where prompts are grouped.
    metrics = make.method.metrics[1:]
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics))
    assert_same(ours.weights(), theirs.weights(), atol=1e-5)
    assert ours.entered > make.train("accumulation", **MODES[mode]).entered  # some sub-batches are computed twice


def test_the_teacher_is_packed_and_compared_as_the_student_is(make):
    trainer = make.train("plain", **MODES["prefix sharing"], max_steps=2).trainer
    student, teacher = (handle.stats for handle in trainer.padding.handles)
    assert teacher.packed_tokens == student.packed_tokens < student.padded_tokens
    assert [len(trainer.padding.parity[of]) for of in ("train", "eval")] == [2, 2]


# Attention


@pytest.mark.slow
def test_student_and_teacher_run_with_what_they_are_asked_to(make):
    attention = {"attn_implementation": "eager", "teacher_attn_implementation": "sdpa"}
    ours = make.train("plain", **MODES["padding-free"], **attention)
    implementations = [m.config._attn_implementation for m in (ours.trainer.model, ours.trainer.teacher_model)]
    assert implementations == ["eager", "sdpa"]
    assert_same(ours.trajectory(), make.theirs("plain").trajectory())


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
        ({}, {"teacher_model": build_model(vocab_size=44)}, "vocab_size"),
    ],
)
def test_what_cannot_be_distilled_is_refused(config, given, message, make):
    with pytest.raises(ValueError, match=message):
        make(config=config, **given)
