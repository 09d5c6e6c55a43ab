"""`packed_multiple_of` in every trainer: TRL's trajectory from packed rows of few lengths."""

from __future__ import annotations

import pytest
import trl
from kit import budget_runs
from kit.observe import entered_tokens
from kit.trainer_runs import MODES, SIDED_MODES, assert_same, figures

import trl_padfix
from trl_padfix.core.layout import shared_prefixes as planning


MULTIPLE = 32
CELLS = [
    ("DPO", "lora", "prefix sharing, right"),
    ("SFT", "short", "padding-free, left"),
    pytest.param("GRPO", "accumulation", "prefix sharing", marks=pytest.mark.slow),
    pytest.param("DPO", "experts", "padding-free, left", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("name", "case", "mode"),
    CELLS,
)
def test_the_trajectory_is_trls_from_rows_of_few_lengths(name, case, mode, makers):
    make = makers(name)
    method, theirs = make.method, make.theirs(case)
    ours = make.train(case, **(MODES | SIDED_MODES)[mode], packed_multiple_of=MULTIPLE)
    metrics = [m for m in (*method.metrics, "aux_loss", "num_tokens") if any(m in log for log in theirs.logs)]
    metrics = [m for m in metrics if m not in method.means]
    assert ours.completions == theirs.completions
    assert_same(ours.trajectory(*metrics), theirs.trajectory(*metrics), method.atol.get(case, 0.0))
    for handle in ours.trainer.padding.handles:
        stats = handle.stats
        assert 0 < stats.packed_tokens <= stats.real_tokens < stats.padded_tokens
        assert 0 < stats.filler_tokens < MULTIPLE * stats.forwards
        assert (stats.packed_tokens + stats.filler_tokens) % MULTIPLE == 0
    shares = [log[name] for log in ours.logs for name in log if name.endswith("padfix/filler_fraction")]
    assert all(0 < share < 0.5 for share in shares)
    assert len(shares) > len(ours.logs) / 2  # none is logged where rows have such a length by themselves
    assert all(log[name] >= 0 for log in ours.logs for name in log if name.endswith("padfix/shared_fraction"))
    if case not in method.uncounted and method.side:
        counts = ours.counts()[mode.split(",")[0]]
        assert counts < ours.entered == counts + ours.trainer.padding.stats.filler_tokens


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
