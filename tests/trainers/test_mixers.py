"""
Trainers on decoders whose layers one packed row cannot serve: TRL's trajectory of 20 steps, in every mode.

Hybrids of linear attention (Qwen3.5), state-space layers (Nemotron-H) or convolutions (LFM2) with attention, an
indexer (DeepSeek V3.2) and ALiBi (Bloom).
"""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from kit.cells import MATRIX
from kit.families import build
from kit.family_outcomes import leaking_layouts, stable_topk
from kit.sft_runs import build_rows
from kit.trainer_runs import MODES, SETTINGS, SIDED_MODES, break_mode, build_tokenizer, words
from transformers import PreTrainedModel, PrinterCallback

from trl_padfix import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


FAMILIES = ["qwen3_5_text", "nemotron_h", "lfm2", "deepseek_v32", "bloom"]
TRAINERS = {
    "dpo": ((trl.DPOTrainer, trl.DPOConfig), (DPOTrainer, DPOConfig)),
    "sft": ((trl.SFTTrainer, trl.SFTConfig), (SFTTrainer, SFTConfig)),
}
FAST = {"dpo": "prefix sharing, right", "sft": "padding-free, left"}
STEPS = 20


@pytest.fixture(autouse=True)
def _stable_choices():
    with stable_topk():
        yield


def build_pairs(count: int, seed: int) -> Dataset:
    """Ragged pairs, some of which have a prompt in common."""
    draw = random.Random(seed)
    prompts = [words(draw, 2, 14) for _ in range(count // 2)]
    answers = [[words(draw, 1, 10) + "<eos>" for _ in range(2)] for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": draw.choice(prompts), "chosen": chosen, "rejected": rejected} for chosen, rejected in answers]
    )


@cache
def initial(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A policy and a reference that differs from it."""
    policy, reference = build(family), build(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for own, other in zip(policy.parameters(), reference.parameters(), strict=True):
            if own.dim() >= 2 and own.is_floating_point():
                own.mul_(0.7)  # so large that a leak is seen, and not so large that 20 steps amplify rounding
                other.mul_(0.7 + 0.1 * torch.randn(own.shape, generator=generator))
    return policy, reference


def trajectory(path: Any, kind: str, classes: tuple[type, type], family: str, **mode: Any) -> torch.Tensor:
    """Loss and gradient norm of each step, and the loss of the evaluation after the last."""
    policy, reference = (copy.deepcopy(model) for model in initial(family))
    settings = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 1.0, "max_length": 26}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "output_dir": str(path)}
    if kind == "dpo":
        given = {"ref_model": reference, "train_dataset": build_pairs(40, 0), "eval_dataset": build_pairs(8, 1)}
    else:
        given = {"train_dataset": build_rows(), "eval_dataset": build_rows(8, 1)}
    trainer_class, config_class = classes
    config = config_class(**SETTINGS | settings | mode)
    trainer = trainer_class(model=policy, args=config, processing_class=build_tokenizer(), **given)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.evaluate()
    logs = trainer.state.log_history
    steps = [(log["loss"], log["grad_norm"]) for log in logs if "loss" in log]
    ends = [(log["eval_loss"], 0.0) for log in logs if "eval_loss" in log]
    assert len(steps) == STEPS
    return torch.tensor(steps + ends, dtype=torch.float64)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    @cache
    def run(kind: str, family: str) -> torch.Tensor:
        return trajectory(tmp_path_factory.mktemp("trl"), kind, TRAINERS[kind][0], family)

    return run


def cells() -> list[Any]:
    return [
        pytest.param(kind, family, mode, marks=[] if mode == FAST[kind] else MATRIX)
        for kind in TRAINERS
        for family in FAMILIES
        for mode in SIDED_MODES
    ]


@pytest.mark.parametrize(("kind", "family", "mode"), cells())
def test_the_trajectory_is_trls(kind, family, mode, theirs, tmp_path):
    ours = trajectory(tmp_path, kind, TRAINERS[kind][1], family, **SIDED_MODES[mode])
    expected = theirs(kind, family)
    assert expected.abs().max() > 1e-1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["padding-free", "prefix sharing"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_leak_would_bend_the_trajectory(kind, mode, theirs, tmp_path, monkeypatch):
    if mode == "prefix sharing":
        break_mode(monkeypatch, mode)
    with nullcontext() if mode == "prefix sharing" else leaking_layouts():
        ours = trajectory(tmp_path, kind, TRAINERS[kind][1], "qwen3_5_text", **MODES[mode], parity_check=False)
    assert (ours - theirs(kind, "qwen3_5_text")).abs().max() > 1e-2
