"""
TRL's `SFTTrainer` and ours: one trajectory, whatever the mode.

Evaluations that are compared with TRL's are one batch: TRL's metrics are means over batches, ours over tokens.
"""

import inspect
import json
import logging
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import trl
from datasets import Dataset
from kit.cells import once_each, slow_but
from kit.flash_stand_in import flash_attention_stand_in
from kit.models import build
from kit.sft_runs import METRICS, TEMPLATE, build_rows
from kit.trainer_runs import (
    BROKEN,
    MODES,
    SETTINGS,
    SIDED_MODES,
    assert_mode_ran,
    assert_same,
    break_mode,
    build_model,
    build_tokenizer,
    lora,
    run,
    watch_inputs,
    words,
)
from peft import PromptTuningConfig, TaskType
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils import is_liger_kernel_available

import trl_padfix
from trl_padfix import (
    DataCollatorForLanguageModeling,
    DPOConfig,
    DPOTrainer,
    PaddingRemovalError,
    ParityError,
    SFTConfig,
    SFTTrainer,
    packed_layout,
)


STEPS = 20
TWO_MODES = ["padding-free, left", "prefix sharing, right"]
NEWEST = hasattr(trl.trainer.utils, "add_fused_lm_head")
"""Whether TRL counts entropy over trained tokens, and transformers labels that are predicted."""
LABELS_IN_DATA = not hasattr(trl.trainer.sft_trainer.DataCollatorForLanguageModeling, "completion_only_loss")
"""Whether TRL makes labels and truncates before training, and not in its collator."""


def rows_of(kind: str):
    return lambda: {"train_dataset": build_rows(kind=kind), "eval_dataset": build_rows(8, 1, kind)}


def half_the_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / (2 * count)


SHORT = {"max_steps": 5}
OBJECTIVES = {
    "texts": ({}, rows_of("texts")),
    "completions only": ({}, dict),
    "assistant only": ({"assistant_only_loss": True}, rows_of("chats")),
    "dft": ({"loss_type": "dft"}, dict),
}
SET_UPS = {
    "accumulation": ({"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2} | SHORT, dict),
    "checkpointing": ({"gradient_checkpointing": True} | SHORT, dict),
    "short rows, padded to multiples of 8": ({"max_length": 12, "pad_to_multiple_of": 8} | SHORT, dict),
    "no length": ({"max_length": None} | SHORT, dict),
    "keep_end": ({"max_length": 12, "truncation_mode": "keep_end"} | SHORT, rows_of("texts")),
    "whole rows of completions": ({"completion_only_loss": False} | SHORT, dict),
    "whole chats": (SHORT, rows_of("chats")),
    "label smoothing": ({"label_smoothing_factor": 0.1, "loss_type": "nll"} | SHORT, dict),
    "a loss of one's own": (SHORT | {"loss_type": "nll"}, lambda: {"compute_loss_func": half_the_loss}),
    "a formatting function": (SHORT, lambda: {"formatting_func": lambda row: row["text"]} | rows_of("texts")()),
    "lora": ({}, lambda: {"peft_config": lora(task_type=TaskType.CAUSAL_LM)}),
    "lora, checkpointing": (
        {"gradient_checkpointing": True} | SHORT,
        lambda: {"peft_config": lora(task_type=TaskType.CAUSAL_LM)},
    ),
    "a stream": (
        SHORT,
        lambda: {
            "train_dataset": build_rows().to_iterable_dataset(),
            "eval_dataset": build_rows(8, 1).to_iterable_dataset(),
        },
    ),
    "wrapped": ({"packing": True, "packing_strategy": "wrapped", "max_length": 24} | SHORT, dict),
}
TUNED = (SHORT, lambda: {"peft_config": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)})
CASES = OBJECTIVES | SET_UPS | {"short": (SHORT, dict), "prompt tuning": TUNED}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def make_trainer(trainer_class=SFTTrainer, config=None, **given):
        config_class = SFTConfig if issubclass(trainer_class, SFTTrainer) else trl.SFTConfig
        settings = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "max_length": 26}
        settings["output_dir"] = str(tmp_path_factory.mktemp("run"))
        defaults = {
            "model": build_model,
            "train_dataset": build_rows,
            "eval_dataset": lambda: build_rows(8, 1),
            "processing_class": lambda: build_tokenizer(chat_template=TEMPLATE),
        }
        given |= {name: default() for name, default in defaults.items() if name not in given}
        given.setdefault("args", config_class(**SETTINGS | settings | (config or {})))
        torch.manual_seed(0)  # some versions of TRL draw adapters and virtual tokens without a seed
        return trainer_class(**given)

    return make_trainer


def train(make, case: str, trainer_class=SFTTrainer, **config):
    settings, given = CASES[case]
    steps = {"max_steps": STEPS} if case in OBJECTIVES else {}
    return run(make(trainer_class, steps | settings | config, **given()), watch_inputs(""))


@pytest.fixture(scope="module")
def trl_run(make):
    return cache(lambda case: train(make, case, trl.SFTTrainer))


# One trajectory


@pytest.mark.parametrize(("objective", "mode"), once_each(OBJECTIVES, list(SIDED_MODES), fully=["completions only"]))
def test_twenty_steps_and_an_evaluation_are_trls(objective, mode, make, trl_run):
    ours = train(make, objective, **SIDED_MODES[mode])
    assert len(ours.trajectory()) == STEPS + 1
    assert_same(ours.trajectory(*METRICS), trl_run(objective).trajectory(*METRICS))
    assert_mode_ran(ours, mode)
    side = mode.split(", ")[1]
    assert any(not mask[:, 0 if side == "left" else -1].all() for _, mask in ours.batches)
    assert all(mask[:, -1 if side == "left" else 0].all() for _, mask in ours.batches)


def test_prompt_tuning_is_trls(make, trl_run):
    ours = train(make, "prompt tuning", padding_free=True)
    assert_same(ours.trajectory(), trl_run("prompt tuning").trajectory())
    assert 0 < ours.trainer._handles[0].stats.packed_tokens < ours.trainer._handles[0].stats.padded_tokens


@pytest.mark.parametrize("mode", [pytest.param(TWO_MODES[0], marks=pytest.mark.slow), TWO_MODES[1]])
@pytest.mark.parametrize("case", SET_UPS)
def test_every_set_up_is_trls(case, mode, make, trl_run):
    ours = train(make, case, **SIDED_MODES[mode])
    assert_same(ours.trajectory(*METRICS), trl_run(case).trajectory(*METRICS))
    if case not in ("label smoothing", "a loss of one's own", "wrapped") and "checkpointing" not in case:
        assert_mode_ran(ours, mode)  # those call the model twice, or compute its layers twice
    (handle,) = ours.trainer._handles
    assert 0 < handle.stats.packed_tokens <= handle.stats.real_tokens < handle.stats.padded_tokens


@pytest.mark.parametrize(("objective", "mode"), once_each(["completions only", "dft"], ["padded, left", *TWO_MODES]))
def test_eight_batches_of_one_are_one_batch_of_eight(objective, mode, make):
    runs = [
        train(
            make, objective, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size, max_steps=5,
            **SIDED_MODES[mode],
        )
        for size in (1, 8)
    ]  # fmt: skip
    assert_same(runs[0].trajectory(), runs[1].trajectory(), atol=1e-5)


@pytest.mark.parametrize("mode", ["padded, left", *TWO_MODES])
def test_flash_attention_2_is_trls(mode, make, trl_run):
    with flash_attention_stand_in() as calls:
        model = build_model(attn_implementation="flash_attention_2")
        ours = run(make(config=SHORT | SIDED_MODES[mode], model=model), watch_inputs(""))
        assert len(calls) > 0
        if not mode.startswith("padded"):
            assert all(call.causal for call in calls)
    assert_same(ours.trajectory(), trl_run("short").trajectory())
    assert_mode_ran(ours, mode)


def test_eager_attention_is_trls(make, trl_run):
    model = build_model(attn_implementation="eager")
    ours = run(make(config=SHORT | MODES["prefix sharing"], model=model), watch_inputs(""))
    assert_same(ours.trajectory(), trl_run("short").trajectory())


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_run_that_removed_no_padding_is_not_taken_for_one_that_did(side, make):
    padded = train(make, "short", padding_side=side)
    assert_mode_ran(padded, "padded")
    for mode in BROKEN:
        with pytest.raises(AssertionError):
            assert_mode_ran(padded, mode)


@pytest.mark.parametrize("mode", BROKEN)
def test_a_leaking_layout_does_not_give_trls_trajectory(mode, make, trl_run, monkeypatch):
    ours = train(make, "completions only", **break_mode(monkeypatch, mode), parity_check=False)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), trl_run("completions only").trajectory())


@pytest.mark.parametrize("mode", BROKEN)
def test_a_leaking_layout_stops_training_and_evaluation(mode, make, monkeypatch):
    trainer = make(config=break_mode(monkeypatch, mode))
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.train()
    assert trainer.state.global_step == 0
    with pytest.raises(ParityError, match="parity FAILED"):
        trainer.evaluate()


# What TRL refuses


@pytest.mark.parametrize("refused", ["max_length", "a collator"])
def test_what_trl_refuses_runs(refused, make, trl_run):
    inner = make(trl.SFTTrainer).data_collator
    given = {"data_collator": lambda rows: inner(rows)} if refused == "a collator" else {}
    config = SHORT | {"padding_free": True} | ({} if refused == "max_length" else {"max_length": None})
    with pytest.raises(ValueError, match=r"padding[-_]free"):
        make(trl.SFTTrainer, config, **given)
    ours = run(make(config=config | {"max_length": 26}, **given), watch_inputs(""))
    assert_same(ours.trajectory(), trl_run("short").trajectory())
    assert_mode_ran(ours, "padding-free")


def test_a_configuration_of_trls_is_taken_as_it_is(make, trl_run, tmp_path):
    settings = SETTINGS | SHORT | {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
    args = trl.SFTConfig(output_dir=str(tmp_path), padding_free=True, max_length=26, **settings)
    ours = run(make(args=args), watch_inputs(""))
    assert_same(ours.trajectory(), trl_run("short").trajectory())
    assert_mode_ran(ours, "padding-free")


# Packing


def packing(strategy: str = "bfd") -> dict:
    return {"packing": True, "packing_strategy": strategy, "max_length": 48, "per_device_train_batch_size": 2} | SHORT


def watch_packed(trainer, batches):
    compute_loss = trainer.compute_loss

    def watched(model, inputs, *args, **kwargs):
        assert "attention_mask" not in inputs
        batches.append(inputs["position_ids"])
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = watched


@pytest.fixture(scope="module")
def trl_packed(make):
    return cache(lambda strategy: run(make(trl.SFTTrainer, packing(strategy)), watch_packed))


@pytest.mark.parametrize(
    ("implementation", "padding_free"),
    [("sdpa", True), ("sdpa", False), ("eager", False), ("flash_attention_2", True), ("flash_attention_2", False)],
)
@pytest.mark.parametrize("strategy", slow_but(["bfd"], ["bfd", "bfd_split"]))
def test_packing_is_trls_on_every_backend(strategy, implementation, padding_free, make, trl_packed):
    theirs = trl_packed(strategy)
    with flash_attention_stand_in():
        config = packing(strategy) | {"padding_free": padding_free}
        ours = run(make(config=config, model=build_model(attn_implementation=implementation)), watch_packed)
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    (handle,) = ours.trainer._handles
    tokens = sum(positions.numel() for positions in ours.batches)
    assert handle.stats.packed_tokens == handle.stats.padded_tokens == ours.entered == tokens
    assert all((positions == 0).sum() > 2 for positions in ours.batches[:5])


def test_packed_rows_share_prefixes(make, trl_packed):
    theirs = trl_packed("bfd")
    ours = run(make(config=packing() | MODES["prefix sharing"]), watch_packed)
    assert_same(ours.trajectory(*METRICS), theirs.trajectory(*METRICS))
    assert 0 < ours.trainer._handles[0].stats.packed_tokens < theirs.entered
    assert all(log["padfix/shared_fraction"] > 0 for log in ours.logs if "loss" in log)


class LargestMask(TorchDispatchMode):
    """The most entries that a tensor had whose last two sizes are equal and large: a mask of all tokens by all."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() > 2 and out.shape[-1] == out.shape[-2] > 48:
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("trainer_class", [SFTTrainer, trl.SFTTrainer])
def test_no_mask_of_all_packed_tokens_by_all_is_built(trainer_class, make):
    trainer = make(trainer_class, packing() | {"max_steps": 1}, eval_dataset=None)
    with LargestMask() as masks:
        trainer.train()
    assert (masks.largest > 0) is (trainer_class is trl.SFTTrainer)


@pytest.mark.parametrize("packs_training", [True, False])
def test_an_evaluation_on_packed_rows_is_one_on_separate_rows(packs_training, make):
    config = EXACT | {"max_length": 48, "packing": packs_training, "per_device_eval_batch_size": 3}
    rows = build_rows(24, 1)
    packed = make(config=config | {"eval_packing": True}, eval_dataset=rows)
    separate = make(config=EXACT | {"max_length": 48}, eval_dataset=rows)
    assert len(packed.eval_dataset) < 24 == len(separate.eval_dataset)
    metrics = [evaluated(trainer) for trainer in (packed, separate)]
    for name in ["eval_loss", "eval_mean_token_accuracy", *(["eval_entropy"] if NEWEST else [])]:
        assert metrics[0][name] == pytest.approx(metrics[1][name], abs=1e-5)
    assert packed._handles[0].stats.packed_tokens > 0
    packed.train()
    assert (packed._handles[0].stats.padded_tokens > 0) is True


GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "pad_token_id": 39}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def build_gpt2():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**GPT2))


@pytest.mark.parametrize("kind", ["texts", "completions"])
@pytest.mark.parametrize("config", [{}, {"padding_free": True}, {"padding_free": True, "max_tokens_per_batch": 60}])
def test_labels_of_first_tokens_are_counted_as_trl_counts_them(config, kind, make):
    """transformers counts the labels of GPT-2, whose `loss_type` it does not know, with those of first tokens."""
    given = {"train_dataset": build_rows(40, kind=kind), "eval_dataset": build_rows(8, 1, kind=kind)}
    settings = SHORT | {"gradient_accumulation_steps": 2}
    ours = make(config=settings | config | {"padding_side": "left"}, model=build_gpt2(), **given)
    theirs = make(trl.SFTTrainer, settings, model=build_gpt2(), **given)
    found = []
    for trainer in (ours, theirs):
        trainer.train()
        trainer.evaluate()
        steps = [[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log]
        found.append(torch.tensor([*steps, [trainer.state.log_history[-1]["eval_loss"], 0.0]]))
    assert_same(*found)
    batch = next(iter(theirs.get_train_dataloader()))
    labels = batch["labels"] != -100
    assert (labels.sum() > labels[:, 1:].sum()) == (kind == "texts")  # it is the first labels that are counted
    assert not getattr(theirs, "_loss_shifts_labels", False)


def test_training_is_padded_where_only_evaluation_packs(make, trl_run):
    ours = run(make(config=SHORT | {"eval_packing": True}, eval_dataset=build_rows(8, 1)), lambda *_: None)
    steps = ours.trajectory()[:-1]
    assert_same(steps, trl_run("short").trajectory()[:-1])
    before = trl_run("short")
    evaluated = ours.trainer._handles[0].stats.packed_tokens
    padded = sum(mask.numel() for _, mask in before.batches[:5])
    assert ours.entered == padded + evaluated


def test_packed_rows_that_leak_stop_training(make, trl_packed, monkeypatch):
    monkeypatch.setattr(
        "trl_padfix.core.call.layout_of.packed_layout",
        lambda positions, **_: packed_layout(positions, cu_seqlens=torch.tensor([0, 3, positions.shape[1]])),
    )
    with pytest.raises(ParityError, match="parity FAILED"):
        make(config=packing()).train()
    theirs = trl_packed("bfd")
    ours = run(make(config=packing() | {"parity_check": False}), watch_packed)
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), theirs.trajectory())


def test_trl_does_not_warn_that_packing_needs_flash_attention(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(config=packing())
    assert not [record for record in caplog.records if "flash" in record.getMessage().lower()]


def test_a_model_that_cannot_be_packed_is_left_to_trl_with_the_reason(make, caplog):
    model = build_model(attn_implementation="flex_attention")
    with caplog.at_level(logging.WARNING):
        trainer = make(config=packing(), model=model)
    assert trainer._handles == []
    assert any(
        "left to the model's own attention" in r.getMessage() and "flex" in r.getMessage() for r in caplog.records
    )
    with pytest.raises(PaddingRemovalError, match="flex_attention"):
        make(config=packing() | {"padding_free": True}, model=build_model(attn_implementation="flex_attention"))


# NEFTune


NOISY = SHORT | {"neftune_noise_alpha": 5.0}


@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
def test_neftune_draws_the_noise_of_the_padded_batch(trainer, make, tmp_path):
    def train_with(library, config):
        trainer_class = getattr(library, trainer)
        made = make(trainer_class, config) if "SFT" in trainer else make_dpo(tmp_path, config, trainer_class)
        return run(made, watch_inputs(""))

    theirs, ours = train_with(trl, NOISY), train_with(trl_padfix, NOISY | {"padding_free": True})
    assert_same(ours.trajectory(), theirs.trajectory(), atol=1e-5)
    stats = ours.trainer._handles[0].stats
    assert 0 < stats.packed_tokens == stats.real_tokens < stats.padded_tokens
    without = train_with(trl_padfix, SHORT | {"padding_free": True})
    with pytest.raises(AssertionError):
        assert_same(without.trajectory(), theirs.trajectory(), atol=1e-5)


def test_noise_of_the_packed_row_would_be_other_noise(make, monkeypatch):
    theirs = run(make(trl.SFTTrainer, NOISY), watch_inputs(""))
    monkeypatch.setattr("trl_padfix.core.decoder._noisy_embeddings", lambda *_: {})
    ours = run(make(config=NOISY | {"padding_free": True}), watch_inputs(""))
    with pytest.raises(AssertionError, match="not close"):
        assert_same(ours.trajectory(), theirs.trajectory(), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_noise_is_bounded_by_the_length_of_the_padded_row(side, make):
    trainer = make(config={"neftune_noise_alpha": 5.0, "padding_free": True, "padding_side": side} | {"max_steps": 1})
    table = trainer.model.get_input_embeddings().weight.detach().clone()
    batches, embedded = [], []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **how: batches.append(inputs) or compute_loss(model, inputs, **how)
    layer = trainer.model.model.layers[0]
    layer.register_forward_pre_hook(lambda m, args: embedded.append(args[0].detach()) if m.training else None)
    trainer.train()
    (batch,), (noisy,) = batches, embedded
    clean = table[batch["input_ids"][batch["attention_mask"].bool()]]
    bound = 5.0 / (batch["input_ids"].shape[1] * table.shape[1]) ** 0.5
    assert 0.9 * bound < (noisy[0] - clean).abs().max() <= bound + 1e-6


def test_neftune_with_prefix_sharing_is_refused(make):
    with pytest.raises(PaddingRemovalError, match=r"noise of its own.*prefix_sharing=False"):
        make(config=MODES["prefix sharing"] | {"neftune_noise_alpha": 5.0})


def dpo_pairs(count: int, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    return Dataset.from_list(
        [
            {"prompt": words(draw, 2, 9), "chosen": words(draw, 1, 9), "rejected": words(draw, 1, 9)}
            for _ in range(count)
        ]
    )


def make_dpo(tmp_path, config, trainer_class=DPOTrainer, **given):
    config_class = DPOConfig if trainer_class is DPOTrainer else trl.DPOConfig
    settings = SETTINGS | {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, "learning_rate": 1e-3}
    given = {"model": build_model(), "ref_model": build_model(seed=1), "train_dataset": dpo_pairs(24)} | given
    return trainer_class(args=config_class(**settings | config), processing_class=build_tokenizer(), **given)


# Evaluation


def evaluated(trainer) -> dict[str, float]:
    """What an evaluation logs; older TRL does not return all of it."""
    trainer.evaluate()
    return trainer.state.log_history[-1]


EXACT = {"exact_eval_means": True}


def batch_sizes(make_sized, names) -> list[dict[str, float]]:
    metrics = [evaluated(make_sized(size)) for size in (1, 2, 8, 64)]
    return [{name: m[f"eval_{name}"] for name in names} for m in metrics]


@pytest.mark.parametrize("mode", ["padded, left", *TWO_MODES])
def test_any_evaluation_batch_size_gives_the_same_metrics(mode, make):
    names = ["loss", "mean_token_accuracy", *(["entropy"] if NEWEST else [])]
    rows = build_rows(21, 3)
    got = batch_sizes(
        lambda n: make(config=SIDED_MODES[mode] | EXACT | {"per_device_eval_batch_size": n}, eval_dataset=rows), names
    )
    for metrics in got[1:]:
        assert metrics == pytest.approx(got[0], abs=1e-5)
    theirs = batch_sizes(lambda n: make(trl.SFTTrainer, {"per_device_eval_batch_size": n}, eval_dataset=rows), names)
    assert theirs[3] == pytest.approx(got[0], abs=1e-5)  # one batch
    assert theirs[2] != pytest.approx(got[0], abs=1e-5)


@pytest.mark.parametrize("mode", ["padded", "prefix sharing"])
def test_any_evaluation_batch_size_gives_the_same_metrics_in_dpo(mode, tmp_path):
    names = ["loss", "rewards/margins", "rewards/chosen", "rewards/accuracies", "logps/rejected"]
    names += ["entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy"] if NEWEST else []
    given = {"train_dataset": dpo_pairs(4), "eval_dataset": dpo_pairs(21, 3)}
    exact = MODES[mode] | EXACT
    got = batch_sizes(lambda n: make_dpo(tmp_path, exact | {"per_device_eval_batch_size": n}, **given), names)
    for metrics in got[1:]:
        assert metrics == pytest.approx(got[0], abs=1e-5)
    theirs = evaluated(make_dpo(tmp_path, {"per_device_eval_batch_size": 64}, trl.DPOTrainer, **given))
    assert got[0] == pytest.approx({name: theirs[f"eval_{name}"] for name in names}, abs=1e-5)


class LogitsSized(TorchDispatchMode):
    """Whether something of `(B, L, V)` was made."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == 40:
            self.seen = True
        return out


@pytest.mark.skipif(not NEWEST, reason="TRL computes its loss from logits")
def test_an_evaluation_of_the_loss_makes_no_logits(make):
    trainer = make(config=MODES["padding-free"] | {"parity_check": False})
    with LogitsSized() as logits:
        trainer.evaluate()
    assert not logits.seen
    with LogitsSized() as logits, torch.no_grad():
        trainer.model(torch.tensor([[1, 2]]))
    assert logits.seen


@pytest.mark.parametrize("mode", TWO_MODES)
def test_compute_metrics_sees_trls_logits_of_the_real_tokens(mode, make):
    def compute_metrics(prediction):
        logits, labels = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
        real = labels != -100
        return {"sum": logits[real].double().abs().sum().item(), "tokens": int(real.sum())}

    theirs, ours = (
        make(trainer_class, config | {"loss_type": "nll"}, compute_metrics=compute_metrics).evaluate()
        for trainer_class, config in ((trl.SFTTrainer, {}), (SFTTrainer, SIDED_MODES[mode]))
    )
    assert ours["eval_tokens"] == theirs["eval_tokens"]
    assert ours["eval_sum"] == pytest.approx(theirs["eval_sum"], rel=1e-5)


@pytest.mark.parametrize("mode", TWO_MODES)
def test_dictionaries_of_evaluation_sets_are_evaluated_each(mode, make):
    sets = {"fresh": build_rows(7, 2), "other": build_rows(5, 3)}
    theirs = make(trl.SFTTrainer, eval_dataset=sets).evaluate()
    trainer = make(config=SIDED_MODES[mode], eval_dataset=sets)
    ours = trainer.evaluate()
    for name in ("eval_fresh_loss", "eval_other_loss"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    if LABELS_IN_DATA:  # before, TRL took prepared data only
        assert trainer.evaluate(build_rows(7, 2))["eval_loss"] == pytest.approx(ours["eval_fresh_loss"], rel=1e-5)


@pytest.mark.skipif(not NEWEST, reason="older transformers have another name for the strategy")
def test_the_longest_batch_is_first_where_transformers_sorts_by_length(make):
    config = SHORT | {"train_sampling_strategy": "group_by_length", "auto_find_batch_size": True, "padding_free": True}
    ours = run(make(config=config), watch_inputs(""))
    lengths = [mask.sum(1).max().item() for _, mask in ours.batches]
    assert lengths[0] == max(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [False, True])
def test_two_processes_normalise_as_trl_does_and_evaluate_as_one(packs, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(f"""
import json
import os
import sys
import torch
import trl
import trl_padfix
from kit.sft_runs import METRICS, TEMPLATE, build_rows
from kit.trainer_runs import SETTINGS, build_model, build_tokenizer
torch.set_num_threads(1)
config = dict(max_length=48, packing=True) if {packs} else dict(max_length=26)
for library, more in ((trl, {{}}), (trl_padfix, dict(padding_free=True, exact_eval_means=True))):
    args = SETTINGS | config | more | dict(
        output_dir={str(tmp_path)!r}, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        per_device_eval_batch_size=2,
    )
    trainer = library.SFTTrainer(
        build_model(), args=library.SFTConfig(**args), train_dataset=build_rows(), eval_dataset=build_rows(8, 1),
        processing_class=build_tokenizer(chat_template=TEMPLATE),
    )
    trainer.train()
    trainer.evaluate()
    assert trainer.accelerator.num_processes == 2
    logs = trainer.state.log_history
    losses = [log["loss"] for log in logs if "loss" in log]
    evaluated = {{name: logs[-1]["eval_" + name] for name in ("loss", "mean_token_accuracy")}}
    if trainer.is_world_process_zero():
        print("figures", json.dumps([losses, evaluated]))
    if library is trl_padfix:
        stats = trainer._handles[0].stats
        assert 0 < stats.packed_tokens
        assert (stats.packed_tokens == stats.padded_tokens) is {packs}
torch.distributed.barrier()
sys.stdout.flush()
os._exit(0)  # threads of gloo outlive the group, and may abort an interpreter that ends under them
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = (json.loads(line.removeprefix("figures")) for line in done.stdout.splitlines() if "figures" in line)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[1] != pytest.approx(theirs[1], abs=1e-5)  # a mean over batches


# The seeds' own scenario


def scenario(side: str, padding_free: bool) -> dict:
    return {
        "max_length": 500,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "max_steps": 10,
        "padding_side": side,
        "padding_free": padding_free,
    }


def assert_evaluated(trainer, padding_free: bool) -> None:
    logs = trainer.state.log_history
    assert [log["step"] for log in logs if "eval_loss" in log] == [10]
    assert all(torch.tensor(log["loss"]).isfinite() for log in logs if "loss" in log)
    assert ("padfix/pad_fraction" in logs[0]) is padding_free


@pytest.mark.parametrize(("side", "padding_free"), once_each(["left", "right"], [False, True]))
@pytest.mark.parametrize("shape", ["qwen2", "llama"])
def test_evaluation_every_ten_steps_under_flash_attention_2(shape, side, padding_free, make):
    with flash_attention_stand_in() as calls:
        trainer = make(config=scenario(side, padding_free), model=build(shape, "flash_attention_2"))
        trainer.train()
        assert len(calls) > 0
    assert_evaluated(trainer, padding_free)


@pytest.mark.gpu
@pytest.mark.skipif(not is_liger_kernel_available(), reason="liger-kernel is not installed")
@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("shape", ["qwen2", "llama"])
def test_the_same_with_ligers_kernels(shape, side, padding_free, make):
    config = scenario(side, padding_free) | {"use_liger_kernel": True, "use_cpu": False}
    # Liger puts its layers into transformers' modules, for every model that is built later.
    with flash_attention_stand_in(), patch.dict(vars(modeling_qwen2)), patch.dict(vars(modeling_llama)):
        trainer = make(config=config, model=build(shape, "flash_attention_2"))
        trainer.train()
    assert_evaluated(trainer, padding_free)


# What a script does with a trainer


def test_fractions_are_those_of_the_data(make):
    ours = train(make, "short", **MODES["prefix sharing"])
    evaluated = next(log for log in ours.logs if "eval_loss" in log)
    for i, log in enumerate([log for log in ours.logs if "loss" in log]):
        mask = ours.batches[i][1]
        assert log["padfix/pad_fraction"] == pytest.approx(1 - mask.sum().item() / mask.numel())
        assert log["perf/tokens_per_second"] > 0
    assert 0 < evaluated["eval_padfix/pad_fraction"] < 1


def test_a_stage_of_dpo_goes_before(make, tmp_path):
    runs = []
    for dpo, sft, config in ((trl.DPOTrainer, trl.SFTTrainer, {}), (DPOTrainer, SFTTrainer, MODES["prefix sharing"])):
        first = make_dpo(tmp_path, SHORT | config, dpo)
        first.train()
        runs.append(run(make(sft, SHORT | config, model=first.model), watch_inputs("")))
    assert_same(runs[1].trajectory(*METRICS), runs[0].trajectory(*METRICS), atol=1e-5)
    assert_mode_ran(runs[1], "prefix sharing")


def test_a_padded_stage_after_a_packed_one_is_padded(make):
    first = make(config=packing())
    first.train()
    after = run(make(config=SHORT, model=first.model), watch_inputs(""))
    assert_mode_ran(after, "padded")


def is_bare(model) -> bool:
    return not any("forward" in vars(module) for module in model.model.modules())


@pytest.mark.parametrize("config", [MODES["prefix sharing"], packing()], ids=["sharing", "packing"])
def test_an_interruption_leaves_a_model_that_can_be_detached(config, make):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    trainer = make(config=config, callbacks=[Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not is_bare(trainer.model)
    trainer.restore_padding()
    assert is_bare(trainer.model)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert trainer.evaluate()["eval_loss"] > 0  # TRL's own way from here on


def test_an_error_while_the_trainer_is_made_leaves_the_model_as_it_was(make):
    model = build_model()
    with pytest.raises(ValueError, match="eval dataset"):
        make(config=MODES["padding-free"], model=model, eval_dataset=build_rows(4).select_columns("prompt"))
    assert is_bare(model)


def test_the_tokenizers_side_is_the_default(make):
    trainer = make(processing_class=build_tokenizer(padding_side="left"))
    assert isinstance(trainer.data_collator, DataCollatorForLanguageModeling)
    assert trainer.data_collator.padding_side == "left"
    assert make(config={"padding_side": "right"}).data_collator.padding_side == "right"


OVERRIDDEN = {
    "_prepare_dataset": "self, dataset, processing_class, args, packing, formatting_func, dataset_name",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
    "evaluation_loop": "self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix",
    "log": "self, logs, start_time",
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_what_we_override_has_the_signature_that_we_assume(name):
    if name == "evaluate" and not NEWEST:
        return
    assert ", ".join(inspect.signature(getattr(trl.SFTTrainer, name)).parameters) == OVERRIDDEN[name]


# Bad input


def masked(row):
    return {"input_ids": [5, 6, 7], "labels": [-100] * 3 if row % 2 else [-100, 6, 7]}


BAD = {
    "no rows": (lambda: {"train_dataset": build_rows(4).select([])}, {}, "The train dataset is empty"),
    "no evaluation rows": (lambda: {"eval_dataset": build_rows(4).select([])}, {}, "The eval dataset is empty"),
    "no columns": (
        lambda: {"train_dataset": Dataset.from_dict({"story": ["w2"]})},
        {},
        r"no column 'text'; it has \['story'\]. SFT needs `text`, `messages`, `prompt` and `completion`",
    ),
    "half of a pair": (
        lambda: {"train_dataset": build_rows(4).select_columns("prompt")},
        {},
        r"no column 'text'; it has \['prompt'\]",
    ),
    "no chat template": (
        lambda: {"train_dataset": build_rows(4, kind="chats"), "processing_class": build_tokenizer()},
        {},
        "no chat template.*Set `tokenizer.chat_template`",
    ),
    "no special tokens": (
        lambda: {"processing_class": build_tokenizer(pad_token=None, eos_token=None)},
        {},
        "neither a pad token nor an EOS token",
    ),
    "no end": (lambda: {"processing_class": build_tokenizer(eos_token=None)}, {}, "no EOS token, and TRL ends"),
    "nothing to train on": (
        lambda: {"train_dataset": Dataset.from_list([{"input_ids": [5, 6], "labels": [5, -100]}] * 3)},
        {},
        "No row of the train dataset has a token to train on",
    ),
    "only prompts": (lambda: {}, {"max_length": 2}, "No row of the train dataset has a token to train on"),
    "a side of packed rows": (
        lambda: {},
        {"packing": True, "padding_side": "left"},
        "`packing=True` leaves nothing to pad on the left",
    ),
    "a side of a collator": (
        lambda: {"data_collator": lambda rows: rows},
        {"padding_side": "left"},
        "`padding_side='left'` is for the default collator",
    ),
    "images without a vision model": (
        lambda: {"train_dataset": build_rows(4, kind="texts").add_column("images", [["a.png"]] * 4)},
        {},
        "vision-related",
    ),
    "Liger on a CPU": (lambda: {}, {"use_liger_kernel": True}, "Triton kernels.*Leave it out here"),
    "sharing of nothing": (lambda: {}, {"prefix_sharing": True}, "needs `padding_free=True`"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_before_the_first_step(case, make):
    if case == "only prompts" and not LABELS_IN_DATA:
        pytest.skip("this TRL truncates in its collator")
    given, config, message = BAD[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make(config=config, **given())


@pytest.mark.skipif(not LABELS_IN_DATA, reason="this TRL truncates in its collator")
def test_rows_that_teach_nothing_are_counted_in_a_warning(make, caplog):
    data = Dataset.from_list([masked(row) for row in range(8)])
    with caplog.at_level(logging.WARNING):
        make(train_dataset=data, eval_dataset=None, config={"max_length": None})
        make(config={"max_length": 14})
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("trl_padfix")]
    assert re.search("4 of 8 rows of the train dataset have no token to train on.*Drop them", ours[0])
    assert any(re.search(r"\d+ of 40 rows of the train dataset were left out.*`max_length=14`", o) for o in ours[1:])


def test_good_rows_give_no_warning(make, caplog):
    with caplog.at_level(logging.WARNING):
        train(make, "short", **MODES["prefix sharing"])
    assert not [r for r in caplog.records if r.name.startswith("trl_padfix")]


def test_an_empty_row_is_named():
    with pytest.raises(ValueError, match="Row 1 of the batch has no token"):
        DataCollatorForLanguageModeling(pad_token_id=39)([{"input_ids": [1]}, {"input_ids": []}])
