"""
Trainers on decoders whose layers one packed row cannot serve: TRL's trajectory of 20 steps, in every mode.

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
from kit.cells import every_second, once_each, slow_but
from kit.families import build
from kit.family_outcomes import leaking_layouts, stable_topk
from kit.mixer_runs import TRAINERS, build_pairs, initial
from kit.sft_runs import build_rows
from kit.trainer_runs import MODES, SETTINGS, SIDED_MODES, break_mode, build_tokenizer
from transformers import PrinterCallback

from trl_padfix import PaddingRemovalError


FAMILIES = ["qwen3_5_text", "nemotron_h", "lfm2", "deepseek_v32", "bloom"]
FAST = [
    ("dpo" if i % 2 else "sft", family, "prefix sharing, right" if i % 2 else "padding-free, left")
    for i, family in enumerate(FAMILIES)
]
STEPS = 20


@pytest.fixture(autouse=True)
def _stable_choices():
    with stable_topk():
        yield


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


@pytest.mark.parametrize(
    ("kind", "family", "mode"),
    slow_but(FAST[:2], [(kind, family, mode) for kind in TRAINERS for family in FAMILIES for mode in SIDED_MODES]),
)
def test_the_trajectory_is_trls(kind, family, mode, theirs, tmp_path):
    ours = trajectory(tmp_path, kind, TRAINERS[kind][1], family, **SIDED_MODES[mode])
    expected = theirs(kind, family)
    assert expected.abs().max() > 1e-1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "mode"), every_second(once_each(TRAINERS, ["prefix sharing", "padding-free"])))
def test_a_leak_would_bend_the_trajectory(kind, mode, theirs, tmp_path, monkeypatch):
    if mode == "prefix sharing":
        break_mode(monkeypatch, mode)
    with nullcontext() if mode == "prefix sharing" else leaking_layouts():
        ours = trajectory(tmp_path, kind, TRAINERS[kind][1], "qwen3_5_text", **MODES[mode], parity_check=False)
    assert (ours - theirs(kind, "qwen3_5_text")).abs().max() > 1e-2


def test_a_decoder_of_whole_rows_is_refused_where_parameters_are_sharded(tmp_path, monkeypatch):
    trainer_class, config_class = TRAINERS["dpo"][1]

    def make():
        config = config_class(**SETTINGS | {"output_dir": str(tmp_path), "padding_free": True})
        models = {"model": build("cpmant"), "ref_model": build("cpmant")}
        return trainer_class(
            **models, args=config, train_dataset=build_pairs(4, 0), processing_class=build_tokenizer()
        )

    make().restore_padding()
    monkeypatch.setattr("trl_padfix.trainers.packing.is_zero_3", lambda accelerator: True)
    with pytest.raises(
        PaddingRemovalError, match=r"CpmAntModel puts `prompt_length=\d+` .* called once for each length"
    ):
        make()
