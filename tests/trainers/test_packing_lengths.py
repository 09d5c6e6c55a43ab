"""`packed_multiple_of` in every trainer: TRL's trajectory from packed rows of few lengths."""

from __future__ import annotations

import os

import pytest
import trl
from datasets import load_dataset
from kit import budget_runs
from kit.observe import entered_tokens
from kit.trainer_runs import MODES, SIDED_MODES, assert_same, figures

import trl_padfix
from trl_padfix import padding_free_layout, prefix_sharing_layout
from trl_padfix.core.layout import shared_prefixes as planning
from trl_padfix.tools.tiny import train_tokenizer


MULTIPLE = 32
HH_RLHF = os.environ.get("TRL_PADFIX_HH_RLHF")
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


@pytest.mark.slow
@pytest.mark.skipif(HH_RLHF is None, reason="TRL_PADFIX_HH_RLHF names no file of HH-RLHF pairs")
@pytest.mark.parametrize(
    ("multiple", "pairs", "sharing"), [(64, 8, False), (64, 8, True), (128, 16, True), (256, 32, True)]
)
def test_filler_is_a_small_share_of_real_pairs(multiple, pairs, sharing):
    """50 batches of HH-RLHF, at most 1,024 tokens a row: the share of docs/speed.md, and few lengths."""
    rows = load_dataset("json", data_files=HH_RLHF, split="train").select(range(1600))
    texts = [*rows["chosen"], *rows["rejected"]]
    tokenizer = train_tokenizer(texts, 8192)
    tokenizer.padding_side = "right"
    filler, tokens, lengths, own_lengths = 0, 0, set(), set()
    for begin in range(0, 50 * pairs, pairs):
        chosen, rejected = (rows[side][begin : begin + pairs] for side in ("chosen", "rejected"))
        made = tokenizer(chosen + rejected, padding=True, truncation=True, max_length=1024, return_tensors="pt")
        ids, mask = made["input_ids"], made["attention_mask"]
        layout = prefix_sharing_layout(ids, mask) if sharing else padding_free_layout(mask)
        own_lengths.add(layout.packed_tokens)
        layout = layout.filled(multiple)
        filler, tokens = filler + layout.filler, tokens + layout.packed_tokens
        lengths.add(layout.packed_tokens)
    assert 0 < filler / tokens < 0.03, (filler / tokens, len(lengths), len(own_lengths))
    assert len(lengths) < len(own_lengths)
