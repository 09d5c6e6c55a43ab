"""TRL's experimental trainers and ours: one trajectory, generation included, whatever the mode."""

import logging
import pickle
import sys
from functools import cache
from importlib import import_module

import pytest
import trl
from kit.cells import by_turns, slow_but
from kit.trainer_runs import MODES, SIDED_MODES, Run, assert_mode_ran, assert_same, break_mode, figures
from packaging.version import Version
from transformers import AutoTokenizer

import trl_padfix
from trl_padfix import ParityError
from trl_padfix.trainers.parts.parity import NOT_COMPARED


if Version(trl.__version__) < Version("1.16"):
    pytest.skip("other experiments than those of TRL 1.16", allow_module_level=True)

from kit.experimental_runs import EXPERIMENTS, MODULES, build, classes, train
from kit.online_runs import save_policy

from trl_padfix.experimental import tasks


PACKED = ["padding-free", "prefix sharing"]
ALL_MODES = MODES | SIDED_MODES
TURNS = by_turns(EXPERIMENTS, PACKED)
CELLS = [("ORPO", "padded"), ("GKD", "padded"), ("ORPO", "prefix sharing")]
CELLS += [(n, f"{mode}, left" if n == "TPO" else mode) for n, mode in TURNS]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def trls(policy, tmp_path_factory):
    """TRL's own runs."""
    return cache(lambda name: train(name, "trl", tmp_path_factory.mktemp("trl"), policy))


@pytest.mark.parametrize(
    ("name", "mode"), slow_but([("ORPO", "prefix sharing"), ("TPO", "padding-free, left")], CELLS)
)
def test_ten_steps_and_an_evaluation_are_trls(name, mode, trls, policy, tmp_path):
    theirs = trls(name)
    ours = train(name, "trl_padfix", tmp_path, policy, **ALL_MODES[mode])
    assert len(ours.trajectory()) == 10 + EXPERIMENTS[name].evaluates
    if mode in ("padded", "padded, right"):
        assert ours.trajectory().tolist() == theirs.trajectory().tolist()
        assert ours.weights().tolist() == theirs.weights().tolist()
    assert_same(ours.trajectory(), theirs.trajectory())
    assert_same(ours.weights(), theirs.weights(), atol=1e-5)  # of Adam
    assert_mode_ran(Run(ours.trainer, [], ours.entered, theirs.batches), mode)
    padding = ours.trainer.padding
    if not mode.startswith("padded"):
        assert all(log["padfix/pad_fraction"] > 0 for log in ours.logs if "loss" in log)
        assert padding.parity.keys() == ({"train", "eval"} if EXPERIMENTS[name].evaluates else {"train"})
        assert {len(reports) for reports in padding.parity.values()} == {len(padding.handles)}
        assert all(handle.stats.packed_tokens < handle.stats.padded_tokens for handle in padding.handles)


@pytest.mark.parametrize(("name", "mode"), slow_but([("ORPO", "padding-free")], by_turns(EXPERIMENTS, PACKED)))
def test_a_leaking_layout_does_not_give_trls_trajectory(name, mode, trls, policy, tmp_path, monkeypatch):
    theirs, config = trls(name), break_mode(monkeypatch, mode)
    with pytest.raises(ParityError, match="parity FAILED"):
        build(name, "trl_padfix", tmp_path, policy, **config).train()
    ours = train(name, "trl_padfix", tmp_path, policy, parity_check=False, **config)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), theirs.trajectory())


@pytest.mark.parametrize("name", slow_but(["ORPO", "SDFT"], [name for name in EXPERIMENTS if name != "OnlineDPO"]))
def test_a_loss_that_reads_padding_is_computed_padded(name, policy, tmp_path):
    class ReadsPadding(classes(name, "trl_padfix")[0]):
        def compute_loss(self, model, inputs, *args, **kwargs):
            batch = self.padding.task.padded_batches(inputs)[0]
            return super().compute_loss(model, inputs, *args, **kwargs) + model(**batch).logits.square().mean()

    def why_padded(**given):
        trainer = build(name, "trl_padfix", tmp_path, policy, max_steps=2, padding_free=True, **given)
        trainer.train()
        assert trainer.padding.parity
        return trainer.padding.why_padded

    assert why_padded() is None
    assert "`attention_mask`" in why_padded(trainer_class=ReadsPadding)


def test_a_loss_in_a_training_step_is_said_not_to_be_compared(policy, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trl_padfix"):
        build("OnlineDPO", "trl_padfix", tmp_path, policy, max_steps=2, padding_free=True).train()
        build("ORPO", "trl_padfix", tmp_path, policy, max_steps=2, padding_free=True).train()
    said = [line for line in caplog.messages if "not compared" in line]
    assert said == [NOT_COMPARED.format("OnlineDPOTrainer")]


METRICS = {name: () for name in EXPERIMENTS if name != "GKD"}
METRICS |= {"ORPO": ("logits/",), "CPO": ("logits/",), "OnlineDPO": ("objective/",)}
"""Metrics that are means over padding, too, in TRL, of all trainers with metrics."""


@pytest.mark.parametrize(("name", "mode"), slow_but([("ORPO", "padding-free"), ("GMPO", "prefix sharing")], TURNS))
def test_within_a_budget_the_steps_and_the_log_are_trls(name, mode, trls, policy, tmp_path, monkeypatch):
    theirs = trls(name)
    budget = max(int(mask.sum(1).max()) for _, mask in theirs.batches)  # the longest row of all forwards
    config = {"max_tokens_per_batch": budget, "parity_check": False}
    ours = train(name, "trl_padfix", tmp_path, policy, **config, **MODES[mode])
    assert_same(ours.trajectory(), theirs.trajectory(), rtol=1e-5, atol=1e-5)
    if name in METRICS:
        assert_same(figures(ours.logs, METRICS[name]), figures(theirs.logs, METRICS[name]), atol=1e-4)
    assert_same(ours.weights(), theirs.weights(), atol=1e-5)
    # Generation leaves no trace here, and TRL's forwards have padding.
    assert max(ours.forwards) <= budget
    assert max(ours.forwards) < max(theirs.forwards)
    assert len(ours.forwards) > len(theirs.forwards)
    wrong = train(name, "trl_padfix", tmp_path, policy, **config, **break_mode(monkeypatch, mode))
    with pytest.raises(AssertionError):
        assert_same(wrong.trajectory(), theirs.trajectory(), rtol=1e-5, atol=1e-5)


LONG = ({"max_tokens_per_batch": 10}, "`max_new_tokens=12` tokens, more than `max_tokens_per_batch=10`")
REFUSED = [("GKD", *LONG), ("OnlineDPO", *LONG)]
REFUSED += [("GKD", {"teacher_model": None}, "The student needs a teacher")]


@pytest.mark.parametrize(("name", "given", "message"), REFUSED)
def test_what_cannot_be_trained_is_refused(name, given, message, policy, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(name, "trl_padfix", tmp_path, policy, padding_free=True, **given)


def test_completions_of_a2po_that_would_follow_padding_are_refused(policy, tmp_path):
    right = AutoTokenizer.from_pretrained(policy, padding_side="right")
    with pytest.raises(ValueError, match="A2PO pads prompts on the tokenizer's side"):
        build("A2PO", "trl_padfix", tmp_path, policy, padding_free=True, processing_class=right)


def test_an_experiment_that_is_not_ours_is_an_error_with_the_way():
    with pytest.raises(
        ImportError, match=r"no `experimental.async_grpo`, but the modules a2po, .*`PaddingRemovalCallback`"
    ):
        import_module("trl_padfix.experimental.async_grpo")
    with pytest.raises(ImportError, match=r"`from trl_padfix.experimental.orpo import ORPOTrainer`"):
        from trl_padfix.experimental import ORPOTrainer  # noqa: F401


def test_what_trl_has_removed_is_gone_with_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.experimental.orpo", None)
    monkeypatch.setitem(sys.modules, "trl.experimental.orpo.orpo_trainer", None)
    monkeypatch.delitem(sys.modules, "trl_padfix.experimental.orpo", raising=False)
    with pytest.raises(ImportError, match=rf"TRL {trl.__version__} has no `trl.experimental.orpo`.*TRL 1\.16"):
        import_module("trl_padfix.experimental.orpo")
    monkeypatch.setattr("trl_padfix.versions.installed_version", lambda package: "1.15.0")
    with pytest.raises(ImportError, match=r"`trl_padfix.experimental` needs trl .*1\.16.*, and 1\.15\.0 is installed"):
        import_module("trl_padfix.experimental.orpo")


def test_an_experiment_that_is_sought_beside_the_stable_trainers_is_found():
    for name in ("ORPOTrainer", "ORPOConfig"):
        with pytest.raises(ImportError, match=f"`from trl_padfix.experimental.orpo import {name}`"):
            getattr(trl_padfix, name)


def test_every_experiment_has_a_cell():
    assert tasks.EXPERIMENTS.keys() == {MODULES.get(name, name.lower()) for name in EXPERIMENTS}


def test_every_experiment_has_trls_names_in_its_module():
    for name in EXPERIMENTS:
        path, found = f"trl_padfix.experimental.{MODULES.get(name, name.lower())}", classes(name, "trl_padfix")
        assert {"padding_free", "prefix_sharing", "parity_check", "strict"} <= {*found[1].__dataclass_fields__}
        for ours, theirs in zip(found, classes(name, "trl"), strict=True):
            assert ours.__name__ == theirs.__name__
            assert issubclass(ours, theirs)
            assert ours.__module__ == path
            assert pickle.loads(pickle.dumps(ours)) is ours  # the arguments of a checkpoint are pickled
