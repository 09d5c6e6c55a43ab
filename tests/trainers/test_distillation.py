"""What distillation has of its own: a teacher. `test_every_method.py` has the trajectories."""

import pytest
import trl
from kit.online_runs import save_policy
from kit.trainer_runs import MODES


if not hasattr(trl, "DistillationTrainer"):
    pytest.skip("this TRL has no stable distillation", allow_module_level=True)


@pytest.fixture(scope="module")
def make(makers):
    return makers("Distillation")


def test_the_teacher_is_packed_and_compared_as_the_student_is(make):
    trainer = make.train("plain", **MODES["prefix sharing"], max_steps=2).trainer
    student, teacher = (handle.stats for handle in trainer.padding.handles)
    assert teacher.packed_tokens == student.packed_tokens < student.padded_tokens
    assert [len(trainer.padding.parity[of]) for of in ("train", "eval")] == [2, 2]


# Attention


def test_a_teacher_that_is_loaded_by_its_name_runs_with_what_it_is_asked_to(make, tmp_path):
    path = save_policy(tmp_path / "teacher", seed=1)
    trainer = make(config={"teacher_attn_implementation": "eager"}, teacher_model=path)
    assert trainer.teacher_model.config._attn_implementation == "eager"
    assert trainer.model.config._attn_implementation == "sdpa"
