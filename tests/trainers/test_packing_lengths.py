"""`packed_multiple_of` under a token budget; `test_every_method.py` has it without one."""

from __future__ import annotations

import trl
from kit import budget_runs
from kit.observe import entered_tokens
from kit.trainer_runs import figures

import trl_padfix
from trl_padfix.core.layout import shared_prefixes as planning


def test_chunks_have_few_lengths_within_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MIN_SAVED_TOKENS", 1)  # every shared prefix has a forward of its own
    given = {"train_dataset": budget_runs.build_branching("DPO", prompts=3)}
    theirs = budget_runs.make(trl, "DPO", tmp_path, **given)
    theirs.train()
    budget = {"max_tokens_per_batch": 64, "packed_multiple_of": 16, "prefix_sharing": True}
    ours = budget_runs.make(trl_padfix, "DPO", tmp_path, budget=True, **given | budget)
    with entered_tokens(ours.model) as entered:
        ours.train()
    budget_runs.assert_same(*(figures(trainer.state.log_history) for trainer in (ours, theirs)))
    assert set(entered) <= {16, 32, 48, 64}
    assert len(entered) >= budget_runs.STEPS * 2  # batches of several forwards
    stats = ours.padding.stats
    assert stats.filler_tokens > 0
    assert stats.packed_tokens < stats.real_tokens
