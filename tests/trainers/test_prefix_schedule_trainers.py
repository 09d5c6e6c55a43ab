"""Trainers under a token budget compute each distinct token of a step once, and keep their trajectory."""

import logging
from unittest.mock import patch

import pytest
from kit.budget_runs import assert_same, build_branching, make
from kit.cells import slow_but
from kit.observe import entered_tokens
from kit.trainer_runs import figures

from trl_padfix import KTOTrainer
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.trainers.batching import micro_batch_budget, micro_batches
from trl_padfix.trainers.batching.micro_batches import join_batches, micro_batches_of
from trl_padfix.trainers.batching.prefix_schedule import MicroBatchRunner
from trl_padfix.trainers.task import Task


@pytest.fixture(autouse=True)
def every_shared_prefix_pays(monkeypatch):
    monkeypatch.setattr(planning, "MIN_SAVED_TOKENS", 1)


BUDGET = {"sft": 44, "dpo": 60, "reward": 60, "kto": 44}


def distinct_tokens(batches, prefix=""):
    """Of all rows of padded batches; `prefix`: of the names of the forward."""
    rows = [{name: batch[prefix + name] for name in ("input_ids", "attention_mask")} for batch in batches]
    return prefix_sharing_layout(*join_batches(rows, 1).values()).packed_tokens


def watched(trainer):
    """
    Train, and list for each step its micro-batches, the tokens that entered the policy, and the distinct ones.

    Those of prefixes that are computed again by intention are not counted.
    """
    computed, steps, training_step, again = entered_tokens(trainer.model), [], trainer.training_step, []
    check = MicroBatchRunner.check

    def checked(runner):
        prefixes = runner.plan.prefixes.values() if runner.plan else ()
        again.append(sum(prefix.tokens for prefix in prefixes if prefix.recompute))
        check(runner)

    def step(model, inputs, *args, **kwargs):
        batches = micro_batches_of(inputs)
        computed.clear()
        again.clear()
        loss = training_step(model, inputs, *args, **kwargs)
        distinct = sum(distinct_tokens(batches, kind) for kind in ("", "KL_") if f"{kind}input_ids" in batches[0])
        steps.append((len(batches), sum(computed) - sum(again), distinct))
        return loss

    trainer.training_step = step
    with patch.object(MicroBatchRunner, "check", checked):
        trainer.train()
    return steps


def assert_same_trajectory(ours, theirs, but=()):
    assert_same(*(figures(trainer.state.log_history, but) for trainer in (ours, theirs)))


def train_both(name, folder, **config):
    """Ours, what it computed in each step, and TRL's with a whole step in one forward."""
    given = {"train_dataset": build_branching(name, prompts=3), "max_steps": 5}
    loss = {k: v for k, v in config.items() if k in ("loss_type", "gradient_checkpointing")}
    theirs = make(name, folder, ours=False, **given, **loss)
    theirs.train()
    budget = {"prefix_sharing": True, "max_tokens_per_batch": BUDGET[name], "parity_check": False}
    ours = make(name, folder, ours=True, **given | budget | config)
    return ours, watched(ours), theirs


CASES = {
    "sft": ("sft", {}),
    "sft, checkpointing": ("sft", {"gradient_checkpointing": True}),
    "dpo, left": ("dpo", {"padding_side": "left"}),
    "dpo, precomputed": ("dpo", {"precompute_ref_log_probs": True}),
    "reward": ("reward", {}),
}


@pytest.mark.parametrize("case", slow_but(["sft", "dpo, left"], CASES))
def test_micro_batches_compute_the_distinct_tokens_of_their_step(case, tmp_path):
    name, config = CASES[case]
    ours, steps, theirs = train_both(name, tmp_path, **config)
    assert_same_trajectory(ours, theirs)
    assert all(count > 1 for count, *_ in steps)
    if not config.get("gradient_checkpointing"):
        assert [computed for _, computed, _ in steps] == [distinct for *_, distinct in steps]


@pytest.mark.parametrize(
    "config", slow_but([{}], [{}, {"precompute_ref_log_probs": True}, {"loss_type": "apo_zero_unpaired"}])
)
def test_kto_computes_the_distinct_tokens_of_both_its_forwards(config, tmp_path):
    ours, steps, theirs = train_both("kto", tmp_path, **config)
    assert_same_trajectory(ours, theirs)
    assert all(count == 1 and computed == distinct for count, computed, distinct in steps)


def test_a_kl_term_of_each_micro_batch_is_another_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(KTOTrainer.task_class, "with_sub_batches", Task.with_sub_batches)
    ours, _, theirs = train_both("kto", tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_trajectory(ours, theirs)


@pytest.mark.slow
def test_a_loss_that_compares_rows_computes_distinct_tokens_twice_at_most(tmp_path):
    ours, steps, theirs = train_both("dpo", tmp_path, loss_type=["sigmoid", "sft"])
    assert_same_trajectory(ours, theirs)
    assert all(count == 1 and distinct < computed <= 2 * distinct for count, computed, distinct in steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_a_run_that_is_resumed_with_another_budget_keeps_its_trajectory(name, tmp_path):
    given = {"train_dataset": build_branching(name, prompts=3), "prefix_sharing": True, "parity_check": False}
    logs = {}
    for budget, checkpoint in ((BUDGET[name], None), (BUDGET[name] + 24, tmp_path / "checkpoint-3")):
        saving = {"save_strategy": "steps", "save_steps": 3, "max_tokens_per_batch": budget, "max_steps": 6}
        trainer = make(name, tmp_path, ours=True, **given | saving)
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        logs[budget] = figures(trainer.state.log_history, ("num_tokens",))
    first, second = logs.values()
    assert_same(second[3:], first[3:])


@pytest.mark.parametrize("name", slow_but(["sft"], ["sft", "dpo"]))
def test_more_sub_batches_and_empty_ones_change_nothing(name, tmp_path, monkeypatch):
    """As where another process has more of them: the largest is cut, and one comes again without a weight."""
    to_equal_count = micro_batches.to_equal_count

    def more(batches, count, rows):
        return [*to_equal_count(batches, count + 2, rows), batches[0]._replace(weight=0.0)]

    monkeypatch.setattr(micro_batch_budget, "to_equal_count", more)
    ours, _, theirs = train_both(name, tmp_path)
    assert_same_trajectory(ours, theirs, ("num_tokens",))


@pytest.mark.slow
def test_what_is_not_served_is_computed_as_before_and_said_once(tmp_path, caplog):
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with caplog.at_level(logging.INFO, logger="trl_padfix"):
        ours, _, theirs = train_both("sft", tmp_path, **reentrant)
    assert_same_trajectory(ours, theirs)
    assert sum("computes the prefixes that it shares" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.slow
def test_adapters_and_their_reference_have_schedules_of_their_own(tmp_path):
    """A reference that is the policy without its adapter runs through the same decoder."""
    logs = []
    for ours in (False, True):
        budget = {"prefix_sharing": True, "max_tokens_per_batch": 60, "parity_check": False} if ours else {}
        given = {"train_dataset": build_branching("dpo", prompts=3), "max_steps": 4, "learning_rate": 1e-2}
        trainer = make("dpo", tmp_path, ours=ours, adapters=True, **given, **budget)
        trainer.train()
        logs.append(trainer)
    assert_same_trajectory(*logs)
