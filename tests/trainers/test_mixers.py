"""
Trainers on decoders whose layers one packed row cannot serve: TRL's trajectory.

Hybrids of linear attention (Qwen3.5), state-space layers (Nemotron-H) or convolutions (LFM2) with attention, an
indexer (DeepSeek V3.2) and ALiBi (Bloom).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.methods import make_trainer
from kit.mixer_runs import build_pairs, initial
from kit.rows import build_rows
from kit.trainer_runs import SIDED_MODES, TWO_MODES, assert_other, assert_same, break_mode, trained
from zoo.family_outcomes import leaking_layouts, stable_topk

import trl_padfix


FAMILIES = ["qwen3_5_text", "nemotron_h", "lfm2", "deepseek_v32", "bloom"]
FAST = [("SFT", "qwen3_5_text", "padding-free, left"), ("DPO", "qwen3_5_text", "prefix sharing, right")]
STEPS = 4
ROUNDING = 1e-4
"""Of states that are handed on in another order of sums; a leak moves a figure by more than 1e-2."""
KINDS = ("DPO", "SFT")


@pytest.fixture(autouse=True)
def _stable_choices():
    with stable_topk():
        yield


def train(path: Any, kind: str, library: Any, family: str, **mode: Any) -> torch.Tensor:
    policy, reference = (copy.deepcopy(model) for model in initial(family))
    given = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 1.0, "max_length": 26}
    given |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "model": policy}
    if kind == "DPO":
        given |= {"ref_model": reference, "train_dataset": build_pairs(40, 0), "eval_dataset": build_pairs(8, 1)}
    else:
        given |= {"train_dataset": build_rows(), "eval_dataset": build_rows(8, 1)}
    found = trained(make_trainer(library, kind, path, **given | mode))
    assert len(found) == STEPS + 1
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    @cache
    def run(kind: str, family: str) -> torch.Tensor:
        return train(tmp_path_factory.mktemp("trl"), kind, trl, family)

    return run


@pytest.mark.parametrize(
    ("kind", "family", "mode"),
    slow_but(FAST, [(kind, family, mode) for kind in KINDS for family in FAMILIES for mode in TWO_MODES]),
)
def test_the_trajectory_is_trls(kind, family, mode, theirs, tmp_path, monkeypatch):
    expected, config = theirs(kind, family), SIDED_MODES[mode]
    assert_same(train(tmp_path, kind, trl_padfix, family, **config), expected, atol=ROUNDING)
    if mode.startswith("prefix"):
        break_mode(monkeypatch, "prefix sharing")
    with nullcontext() if mode.startswith("prefix") else leaking_layouts():
        wrong = train(tmp_path, kind, trl_padfix, family, **config, parity_check=False)
    assert_other(wrong, expected, atol=ROUNDING)
