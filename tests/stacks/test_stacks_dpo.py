"""
A DPO run of five steps on every stack with trainers: one trajectory for TRL's trainer and ours in every mode.
"""

from __future__ import annotations

import random

import pytest
from stack_models import EOS, PAD, build


pytest.importorskip("trl", minversion="1.0", reason="the trainers need TRL 1.0")

import torch
import trl
from datasets import Dataset
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


def trajectory(trainer_class, config_class, tmp_path, **settings) -> torch.Tensor:
    """Loss, gradient norm and margin of every step, and loss and margin of the evaluation after the last."""
    args = config_class(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=4, per_device_eval_batch_size=4,
        learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        bf16=False, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    trainer = trainer_class(
        model=build("qwen2"),
        ref_model=build("llama"),  # another one, so that the margins are large from the first step
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
def trl_trajectory(tmp_path_factory) -> torch.Tensor:
    return trajectory(trl.DPOTrainer, trl.DPOConfig, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("mode", MODES)
def test_trajectory_equals_trls(mode, trl_trajectory, tmp_path):
    found = trajectory(DPOTrainer, DPOConfig, tmp_path, **MODES[mode])
    torch.testing.assert_close(found, trl_trajectory, rtol=2e-4, atol=2e-4)


def misplaced(mask):
    """The right tokens in the right rows, at wrong places."""
    layout = correct_layout(mask)
    layout.positions.add_(torch.arange(layout.packed_tokens) % 3)
    return layout


def test_negative_control_another_layout_gives_another_trajectory(trl_trajectory, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_padfix.decoder.padding_free_layout", misplaced)
    found = trajectory(DPOTrainer, DPOConfig, tmp_path, **MODES["padding-free, left"], parity_check=False)
    assert (found - trl_trajectory).abs().max() > 0.01
    with pytest.raises(ParityError):
        trajectory(DPOTrainer, DPOConfig, tmp_path, **MODES["padding-free, left"])
