"""Each field of TRL's configurations, changed by itself: training and evaluations stay TRL's, in every mode."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import trl
from kit.cells import slow_but
from kit.methods import DEFAULTS, make_trainer
from kit.sft_cases import NEWEST
from kit.trainer_runs import assert_same, figures

import trl_padfix
from trl_padfix.core.layout import shared_prefixes


pytestmark = pytest.mark.skipif(not NEWEST, reason="fields of the newest TRL")

MODES: dict[str, dict[str, Any]] = {
    "padding-free": {},
    "prefix sharing": {"prefix_sharing": True},
    "token budget": {"prefix_sharing": True, "max_tokens_per_batch": 64},
}
VALUES: dict[str, list[Any]] = {
    "accelerator_config": [{"dispatch_batches": True}, {"non_blocking": True}],
    "eval_strategy": ["epoch"],
    "eval_steps": [1, 0.5],
    "gradient_accumulation_steps": [2, 3],
    "include_num_input_tokens_seen": ["non_padding"],
    "label_smoothing_factor": [0.1],
    "logging_steps": [2, 0.5],
    "logging_strategy": ["epoch"],
    "lr_scheduler_type": ["cosine"],
    "max_grad_norm": [0.0, 0.1],
    "max_length": [12, None],
    "max_steps": [-1, 2],
    "num_train_epochs": [1],
    "optim": ["adafactor", "rmsprop"],
    "pad_to_multiple_of": [8],
    "per_device_eval_batch_size": [1, 5],
    "per_device_train_batch_size": [3, 8],
    "save_steps": [1],
    "save_strategy": ["epoch", "steps"],
    "seed": [3],
    "train_sampling_strategy": ["sequential"],
    "truncation_mode": ["keep_end"],
    "warmup_steps": [2],
    "weight_decay": [0.1],
}
"""Values of fields that have no plain other value. A switch is turned over, a number halved or raised by one."""

OTHERS = ("hub_", "push_", "fsdp", "ddp_", "tpu", "torch_compile", "log_level", "logging_dir", "trackio", "report_to")
"""Beginnings of fields that need an account, several processes, a compiler, or only change what is printed."""
LEFT_OUT = {
    *("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "full_determinism", "deepspeed", "debug"),
    *("output_dir",),
    *("packing", "padding_free", "use_liger_kernel", "activation_offloading", "auto_find_batch_size", "run_name"),
    *("load_best_model_at_end", "dataloader_persistent_workers", "assistant_only_loss", "skip_memory_metrics"),
    *("eval_packing", "ref_model_sync_steps", "ref_model_mixup_alpha", "discopop_tau", "f_alpha_divergence_coef"),
    *("greater_is_better", "logging_first_step", "sync_ref_model", "disable_dropout", "trust_remote_code"),
}  # fmt: skip
"""Fields with a test of their own, or that change nothing by themselves."""

MEANS_OF_TOKENS = ("entropy", "mean_token_accuracy", "logits/")
"""Metrics that a budget logs as means over all tokens of a step, which are the same in a step of one micro-batch."""


def fields(kind: str) -> list[tuple[str, str, Any]]:
    """Kind, field and value, for each other value of each field."""
    found = []
    for field in dataclasses.fields(getattr(trl, f"{kind}Config")):
        if not field.init or field.name in LEFT_OUT or field.name.startswith(OTHERS):
            continue
        values = VALUES.get(field.name, [])
        if not values and isinstance(field.default, bool):
            values = [not field.default]
        elif not values and isinstance(field.default, float):
            values = [field.default / 2 or 0.1]
        elif not values and isinstance(field.default, int):
            values = [field.default + 1]
        found += [(kind, field.name, value) for value in values]
    return found


CASES = [case for kind in ("SFT", "DPO", "Reward", "KTO") for case in fields(kind)]
ON_EVERY_PUSH = [("SFT", "label_smoothing_factor", 0.1), ("DPO", "per_device_train_batch_size", 3)]


def outcome(library: Any, kind: str, folder: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor, int, Any]:
    """Figures of steps and evaluations, weights, the number of steps, and our token counts."""
    given = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": DEFAULTS[kind]["eval_dataset"]()} | given
    trainer = make_trainer(library, kind, folder, **given)
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    counts = trainer.padding.stats if library is trl_padfix else None
    but = ("num_input_tokens_seen",) + MEANS_OF_TOKENS * (given.get("gradient_accumulation_steps", 1) > 1)
    return figures(trainer.state.log_history, but), weights, trainer.state.global_step, counts


@pytest.fixture(scope="module")
def outcome_of_trl(tmp_path_factory):
    """TRL's outcome for a case, by its number; computed once for all modes."""
    return functools.cache(lambda i: outcome(trl, CASES[i][0], tmp_path_factory.mktemp("trl"), **dict([CASES[i][1:]])))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "name", "value"), slow_but(ON_EVERY_PUSH, CASES))
def test_a_training_with_another_value_of_a_field_is_trls(
    kind, name, value, mode, tmp_path, outcome_of_trl, monkeypatch
):
    monkeypatch.setattr(shared_prefixes, "MIN_SAVED_TOKENS", 1)
    ours = outcome(trl_padfix, kind, tmp_path, padding_free=True, **{name: value}, **MODES[mode])
    theirs = outcome_of_trl(CASES.index((kind, name, value)))
    assert ours[2] == theirs[2]
    stats = ours[3]
    assert stats.forwards > stats.padded_forwards == 0
    assert (stats.packed_tokens < stats.real_tokens) is ("prefix_sharing" in MODES[mode])
    assert_same(ours[0], theirs[0], atol=2e-5, rtol=1e-3)
    assert_same(ours[1], theirs[1], atol=2e-4)


def test_with_another_value_on_one_side_it_is_not(tmp_path):
    """The control."""
    theirs = outcome(trl, "SFT", tmp_path / "trl", label_smoothing_factor=0.1)
    ours = outcome(trl_padfix, "SFT", tmp_path / "ours", padding_free=True, label_smoothing_factor=0.11)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours[0], theirs[0], atol=2e-5, rtol=1e-3)
