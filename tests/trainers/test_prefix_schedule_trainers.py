"""Trainers under a token budget compute each distinct token of a batch once, and keep their trajectory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import trl
from kit.budget_runs import assert_same, build_branching, make, train_split
from kit.cells import slow_but
from kit.trainer_runs import figures

import trl_padfix
from trl_padfix import KTOTrainer
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.core.layout.build import prefix_sharing_layout
from trl_padfix.trainers.batching.prefix_schedule import ChunkRunner
from trl_padfix.trainers.batching.token_budget import TokenBudget
from trl_padfix.trainers.task import Task


@pytest.fixture(autouse=True)
def every_shared_prefix_pays(monkeypatch):
    monkeypatch.setattr(planning, "MIN_SAVED_TOKENS", 1)


BUDGET = {"SFT": 44, "DPO": 60, "Reward": 60, "KTO": 44}


class Counts:
    """While it is entered: distinct tokens of all batches whose loss is trained, those of prefixes computed again."""

    def __init__(self) -> None:
        self.distinct = self.again = 0

    def __enter__(self) -> Counts:
        compute, check = TokenBudget.compute_loss, ChunkRunner.check

        def computed(part: Any, of_trl: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            for forward in part.trainer.padding.task.padded_batches(inputs):
                self.distinct += prefix_sharing_layout(*forward.values()).packed_tokens
            return compute(part, of_trl, model, inputs, *args, **kwargs)

        def checked(runner: ChunkRunner) -> None:
            prefixes = runner.plan.prefixes.values() if runner.plan else ()
            self.again += sum(prefix.tokens for prefix in prefixes if prefix.recompute)
            check(runner)

        self.patches = [
            patch.object(TokenBudget, "compute_loss", computed),
            patch.object(ChunkRunner, "check", checked),
        ]
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.patches:
            each.stop()


def train_both(kind, folder, **config):
    """Ours and what it counted, and TRL's on whole batches."""
    data = {"train_dataset": build_branching(kind, prompts=3)}
    of_both = {k: v for k, v in config.items() if k not in ("padding_side", "max_tokens_per_batch")}
    theirs = make(trl, kind, folder, **data, **of_both)
    theirs.train()
    budget = {"prefix_sharing": True, "max_tokens_per_batch": BUDGET[kind]}
    with Counts() as counts:
        ours = train_split(make(trl_padfix, kind, folder, budget=True, **data | budget | config))
    return ours, counts, theirs


def assert_same_trajectory(ours, theirs, factor=1):
    assert_same(*(figures(t.state.log_history) for t in (ours.trainer, theirs)), factor)


CASES = {
    "SFT": ("SFT", {}),
    "SFT, accumulated": ("SFT", {"gradient_accumulation_steps": 3}),
    "SFT, checkpointing": ("SFT", {"gradient_checkpointing": True}),
    "DPO, left": ("DPO", {"padding_side": "left"}),
    "DPO, precomputed": ("DPO", {"precompute_ref_log_probs": True}),
    "Reward": ("Reward", {}),
    "KTO": ("KTO", {}),
    "KTO, precomputed": ("KTO", {"precompute_ref_log_probs": True}),
    "KTO, without the KL term": ("KTO", {"loss_type": "apo_zero_unpaired"}),
}


@pytest.mark.parametrize("case", slow_but(["SFT", "DPO, left", "KTO"], CASES))
def test_chunks_compute_the_distinct_tokens_of_their_batch(case, tmp_path):
    kind, config = CASES[case]
    ours, counts, theirs = train_both(kind, tmp_path, **config)
    assert_same_trajectory(ours, theirs)
    assert min(ours.chunks) > 1
    if not config.get("gradient_checkpointing"):
        assert sum(ours.forwards) - counts.again == counts.distinct


def test_a_kl_term_of_each_chunk_is_another_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(KTOTrainer.task_class, "around_chunks", Task.around_chunks)
    ours, _, theirs = train_both("KTO", tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_trajectory(ours, theirs, factor=10)
