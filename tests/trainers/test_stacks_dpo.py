"""
DPO runs of five steps on every stack with trainers: one trajectory for TRL's trainer and ours in every mode.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from kit.cells import slow_but
from kit.stack_models import EOS, PAD, build


pytest.importorskip("trl", minversion="1.0", reason="the trainers need TRL 1.0")

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback

from trl_padfix import DPOConfig, DPOTrainer, ParityError
from trl_padfix import padding_free_layout as correct_layout


pytestmark = pytest.mark.stacks

WORDS = {"<bos>": 0, "<eos>": EOS, "<pad>": PAD} | {f"w{i}": i for i in range(2, 39)}
MODES = {
    f"{name}, {side}": {"padding_free": name != "padded", "prefix_sharing": name == "sharing", "padding_side": side}
    for name in ("padded", "padding-free", "sharing")
    for side in ("left", "right")
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(WORDS))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def pairs(count: int) -> Dataset:
    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return "".join(f"w{draw.randint(2, 38)} " for _ in range(draw.randint(low, high)))

    return Dataset.from_list(
        [{"prompt": words(2, 18), "chosen": words(1, 12), "rejected": words(1, 12)} for _ in range(count)]
    )


SET_UPS = {
    "full": {},
    "lora": {"peft": True},
    "precomputed reference": {"precompute_ref_log_probs": True},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "accumulation": {"gradient_accumulation_steps": 2},
}


def trajectory(trainer_class, config_class, tmp_path, peft=False, **settings) -> torch.Tensor:
    """Loss, gradient norm and margin of every step, and loss and margin of the evaluation after the last."""
    args = config_class(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=4, per_device_eval_batch_size=8,
        learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        bf16=False, **{"gradient_checkpointing": False} | settings,
    )  # fmt: skip
    torch.manual_seed(0)  # TRL 1.0 draws adapters before it sets its seed
    trainer = trainer_class(
        model=build("qwen2"),
        # Another model, or adapters that are not zero, so that the margins are large from the first step.
        ref_model=None if peft else build("llama"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False) if peft else None,
        args=args,
        train_dataset=pairs(20),
        eval_dataset=pairs(6),
        processing_class=tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.evaluate()
    evaluation = next(entry for entry in trainer.state.log_history if "eval_loss" in entry)
    steps = [
        [entry["loss"], entry["grad_norm"], entry["rewards/margins"]]
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    assert len(steps) == 5
    return torch.tensor([*steps, [evaluation["eval_loss"], 0.0, evaluation["eval_rewards/margins"]]])


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory):
    """The trajectory of TRL's own trainer in a set-up, computed once."""

    def run(set_up: str) -> torch.Tensor:
        return trajectory(trl.DPOTrainer, trl.DPOConfig, tmp_path_factory.mktemp("trl"), **SET_UPS[set_up])

    return cache(run)


@pytest.mark.parametrize(
    ("set_up", "mode"),
    slow_but(
        [("full", "padding-free, left"), ("full", "sharing, right"), ("lora", "sharing, left")],
        [
            *(("full", mode) for mode in MODES),
            ("lora", "sharing, left"),
            ("precomputed reference", "sharing, right"),
            ("checkpointing", "sharing, right"),
            ("reentrant checkpointing", "padding-free, left"),
            ("accumulation", "padding-free, right"),
        ],
    ),
)
def test_trajectory_equals_trls(set_up, mode, of_trl, tmp_path):
    found = trajectory(DPOTrainer, DPOConfig, tmp_path, **SET_UPS[set_up], **MODES[mode])
    torch.testing.assert_close(found, of_trl(set_up), rtol=2e-4, atol=2e-4)


def misplaced(mask):
    """The right tokens in the right rows, at wrong places."""
    layout = correct_layout(mask)
    layout.positions.add_(torch.arange(layout.packed_tokens) % 3)
    return layout


def test_negative_control_another_layout_gives_another_trajectory(of_trl, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.core.call.layout_of.padding_free_layout", misplaced)
    found = trajectory(DPOTrainer, DPOConfig, tmp_path, **MODES["padding-free, left"], parity_check=False)
    assert (found - of_trl("full")).abs().max() > 0.01
    with pytest.raises(ParityError):
        trajectory(DPOTrainer, DPOConfig, tmp_path, **MODES["padding-free, left"])
