"""
A real model (SmolLM2-135M-Instruct) on real rows, with TRL's defaults: bf16, gradient checkpointing.

`TRL_PADFIX_SMOLLM2` names the folder that `python recipes/smollm2.py FOLDER` writes. Random weights hide what half
precision does, so losses are held to the distance that bf16 itself has from float32 in TRL.
"""

import json
import os
from functools import cache
from gzip import open as open_gzip
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from kit.methods import make_trainer
from kit.trainer_runs import break_mode, lora
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_padfix


MODEL = os.environ.get("TRL_PADFIX_SMOLLM2", "")
DATA = Path(__file__).parents[2] / "recipes/data/gsm8k/pairs.jsonl.gz"
PACKED = {"padding_free": True, "prefix_sharing": True}
SHARING = "prefix sharing"
HALF = 2.0**-8
"""The relative distance of two neighbors in bfloat16."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(not MODEL, reason="TRL_PADFIX_SMOLLM2 names no folder of SmolLM2"),
]


@cache
def pairs():
    """Four pairs of a short question and the first lines of its solutions: bfloat16 is slow on most CPUs."""
    with open_gzip(DATA, "rt") as file:
        rows = [{name: text.splitlines()[0] for name, text in json.loads(line).items()} for line in file]
    return sorted(
        (row for row in rows if row["chosen"] != row["rejected"]), key=lambda row: len("".join(row.values()))
    )[:4]


def columns(kind):
    if kind in ("DPO", "Reward"):
        return pairs()
    if kind == "SFT":
        return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]
    if kind == "KTO":
        answers = [
            (row["prompt"], row[name], name == "chosen") for row in pairs()[:2] for name in ("chosen", "rejected")
        ]
        return [dict(zip(("prompt", "completion", "label"), answer, strict=True)) for answer in answers]
    return [{"prompt": row["prompt"]} for row in pairs()]


def given(kind, folder):
    """What the trainer of a kind needs beside its configuration."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    settings = {"processing_class": tokenizer, "train_dataset": Dataset.from_list(columns(kind)), "max_steps": 1}
    settings |= {"model": MODEL, "learning_rate": 1e-5, "per_device_train_batch_size": 2}
    if kind == "Reward":
        model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1)
        model.score.weight.data.fill_(0.01)  # the head is drawn anew
        model.config.pad_token_id = tokenizer.pad_token_id
        settings |= {"model": model}
    if kind in ("DPO", "KTO"):
        settings |= {"ref_model": None}
    if kind in ("GRPO", "RLOO"):
        settings |= {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
        settings |= {"max_completion_length": 8, "num_generations": 2}
    if kind == "Distillation":
        settings |= {"teacher_model": MODEL, "max_completion_length": 8}
    return settings | {"output_dir": str(folder)}


def losses(library, kind, folder, **more):
    trainer = make_trainer(
        library, kind, folder, **given(kind, folder) | {"bf16": True, "gradient_checkpointing": True} | more
    )
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log], trainer


@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "Distillation"])
def test_a_real_model_has_trls_losses_at_trls_defaults(kind, tmp_path):
    theirs, _ = losses(trl, kind, tmp_path / "theirs")
    ours, trainer = losses(trl_padfix, kind, tmp_path / "ours", **PACKED)
    assert trainer.padding.stats.packed_tokens < trainer.padding.stats.padded_tokens
    assert trainer.padding.stats.padded_forwards == 0
    assert len(theirs) == 1
    for (loss, norm), (own_loss, own_norm) in zip(ours, theirs, strict=True):
        assert abs(loss - own_loss) <= 4 * HALF * max(abs(own_loss), 1)
        assert abs(norm - own_norm) <= 16 * HALF * max(own_norm, 1)


def test_a_layout_that_mixes_rows_stops_the_training_of_a_real_model(tmp_path, monkeypatch):
    mode = break_mode(monkeypatch, SHARING)
    with pytest.raises(trl_padfix.ParityError, match="FAILED"):
        losses(trl_padfix, "DPO", tmp_path, **mode)


def test_adapters_generation_and_resuming_on_a_real_model(tmp_path):
    """In float32: two steps, a checkpoint after the first, and texts in the evaluation."""
    more = {
        "bf16": False,
        "peft_config": lora(target_modules=["q_proj", "v_proj"]),
        "save_strategy": "steps",
        "max_steps": 2,
    }
    more |= {"save_steps": 1, "eval_dataset": Dataset.from_list(columns("SFT")[:2]), "eval_strategy": "steps"}
    more |= {"eval_steps": 1}
    theirs, _ = losses(trl, "SFT", tmp_path / "theirs", **more)
    more |= PACKED | {"predict_with_generate": True, "generation_max_new_tokens": 8}
    ours, _ = losses(trl_padfix, "SFT", tmp_path / "ours", **more)
    for found, own in zip(ours, theirs, strict=True):
        assert found == pytest.approx(own, rel=1e-4)
    texts = sorted((tmp_path / "ours/generations").iterdir())
    assert len(texts) == 2
    folder = tmp_path / "ours"
    trainer = make_trainer(trl_padfix, "SFT", folder, **given("SFT", folder) | more)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    assert trainer.state.log_history[-1]["step"] == 2
    (resumed,) = [
        (log["loss"], log["grad_norm"]) for log in trainer.state.log_history if log.get("step") == 2 and "loss" in log
    ]
    assert resumed == pytest.approx(ours[1], rel=1e-4)
