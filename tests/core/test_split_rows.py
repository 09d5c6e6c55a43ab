"""Context parallelism: the tokens that each process computes, and the outputs that all processes get."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from kit.cells import slow_but
from kit.processes import ROOT, run_processes
from zoo.families import build as build_family
from zoo.models import build

from trl_padfix import PaddingRemovalError, prefix_sharing_layout, remove_padding, split_rows
from trl_padfix.core.parallel.collectives import Group
from trl_padfix.core.parallel.local import ContextParallelTokens, LocalLabels


FIRST = ["qwen2-5-heads", "gpt-oss-sinks", "qwen3.5-delta-rule"]
TOLERANCE = {"loss": 2e-6, "values": 3e-5, "gradients": 3e-5}


def launched(processes: int, models: list[str], broken: str = "") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    script = str(ROOT / "tests/kit/processes.py")
    done = run_processes([*command, script, "kit.split_runs", *models], {"BROKEN": broken}, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def misses(case: dict[str, Any]) -> list[str]:
    return [name for name, most in TOLERANCE.items() if not case[name] <= most]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "models"),
    [
        (2, FIRST),
        pytest.param(2, ["gemma2-softcap", "qwen3-moe", "qwen3-tied"], marks=pytest.mark.matrix),
        pytest.param(4, ["qwen2-8-heads", "bamba-mamba2"], marks=pytest.mark.matrix),
    ],
)
def test_every_process_gets_what_the_padded_computation_gives(processes, models):
    """Losses, log-probabilities, logits and gradients, with shared prefixes and checkpointing and without."""
    cases = launched(processes, models)
    assert len(cases) == 24 * len(models)
    assert [(case["case"], misses(case)) for case in cases if misses(case)] == []
    reports = [case["parity"] for case in cases if case["parity"]]
    assert len(reports) == 4 * len(models)
    assert all(report["ok"] and report["gradient"] is not None for report in reports), reports
    for case in cases:
        assert len(case["tokens"]) == processes
        if case["case"][1] == "one token" and case["packed"] < processes:  # all compute all
            assert case["tokens"] == [case["packed"]] * processes
        else:
            assert sum(case["tokens"]) == case["packed"]
            assert max(case["tokens"]) - min(case["tokens"]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("broken", slow_but(["exit"], ["exit", "slice"]))
def test_a_missing_factor_and_a_wrong_slice_are_seen(broken):
    found = launched(2, ["qwen2"], broken)
    cases, reports = ([c for c in found if c["case"][1] == "pairs"], [c["parity"] for c in found if c["parity"]])
    assert all(misses(case) for case in cases)
    assert not any(report["ok"] for report in reports)


def layout_of(*rows: list[int]) -> Any:
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return prefix_sharing_layout(ids, torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]))


LAYOUT = layout_of(list(range(1, 15)), [*range(1, 10), 20, 21], [1, 2, 3, 30, 31, 32, 33], [40, 41, 42])


def tokens_of_ranks(layout: Any, processes: int) -> list[ContextParallelTokens]:
    return [ContextParallelTokens(layout, Group(None, rank, processes)) for rank in range(processes)]


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_every_token_is_computed_by_one_process(processes):
    tokens, of_ranks = torch.arange(LAYOUT.packed_tokens), tokens_of_ranks(LAYOUT, processes)
    parts = [of_rank.local(tokens) for of_rank in of_ranks]
    assert torch.cat(parts).equal(tokens)
    assert [len(part) for part in parts] == of_ranks[0].tokens_per_rank
    for rank, (of_rank, part) in enumerate(zip(of_ranks, parts, strict=True)):
        assert (of_rank.rank_of(part) == rank).all()
        assert of_rank.local_index(part).equal(torch.arange(len(part)))


def test_features_of_visual_tokens_go_with_their_tokens():
    """Those of several layers (Qwen3-VL), which are in the order of the visual tokens; positions have axes."""
    tokens = torch.arange(LAYOUT.packed_tokens)
    visual = tokens % 3 == 1
    features = tokens[visual].float()[:, None]
    call = {"inputs_embeds": tokens[None, :, None], "position_ids": tokens.expand(3, 1, -1)}
    call |= {"visual_pos_masks": visual[None], "deepstack_visual_embeds": [features, -features]}
    for of_rank in tokens_of_ranks(LAYOUT, 3):
        own, found = of_rank.local(tokens), of_rank.select(call)
        assert found["inputs_embeds"].flatten().equal(own)
        assert found["position_ids"].equal(own.expand(3, 1, -1))
        of_own = own[own % 3 == 1].float()[:, None]
        assert found["visual_pos_masks"].sum() == len(of_own) < len(features)
        for layer, expected in zip(found["deepstack_visual_embeds"], (of_own, -of_own), strict=True):
            assert layer.equal(expected)


def test_a_label_is_scored_where_its_token_is_computed():
    """Rows of one length have no padding to remove, and are sorted where prefixes are looked for."""
    layout, places = layout_of([9, 8, 7], [3, 2, 1], [6, 5, 4]), torch.arange(9)
    for of_rank in tokens_of_ranks(layout, 2):
        local = of_rank.local(layout.packed_index)
        assert set(LocalLabels(places, places, of_rank).index.tolist()) == set(local.tolist())


def test_processes_with_other_batches_get_an_error(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda extremes, *_, **__: extremes.fill_(1))
    handle = remove_padding(build("qwen2"))
    handle.context_parallel = Group(None, 0, 2)
    with pytest.raises(ValueError, match="given different batches"):
        handle.decoder(torch.ones(2, 5, dtype=torch.int64), attention_mask=torch.ones(2, 5))


def test_fewer_heads_of_a_recurrence_than_processes_are_an_error_on_each_of_them():
    for of_rank in tokens_of_ranks(LAYOUT, 5):
        convolution = of_rank.mix("causal_conv1d_fn", lambda hidden_states, weight: None)
        with pytest.raises(PaddingRemovalError, match=r"4 heads .or channels. cannot be shared by 5 processes"):
            convolution(torch.zeros(1, 4, 8), torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("family", "processes", "error", "says"),
    [
        ("qwen2", 8, ValueError, "4 attention heads for 8 processes"),
        ("bloom", 2, PaddingRemovalError, "computed on whole rows.*without context parallelism"),
        ("mamba", 2, PaddingRemovalError, "need all channels"),
    ],
)
def test_what_cannot_be_split_is_refused(family, processes, error, says, monkeypatch):
    monkeypatch.setattr(Group, "of", classmethod(lambda cls, group=None: cls(None, 0, processes)))
    model = build(family) if family == "qwen2" else build_family(family)
    with remove_padding(model) as handle, pytest.raises(error, match=f"(?s){says}"):
        split_rows(handle)
    assert handle.context_parallel is None
