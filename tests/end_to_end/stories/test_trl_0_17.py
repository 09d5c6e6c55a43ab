"""
TRL 0.17 on transformers 4.52 with FlashAttention 2, and one added line.

Its own trainers raise: DPO on a full model in the first training step, DPO with LoRA in evaluation (also at batch 1: a
pair is two rows of different length), SFT in evaluation. With `remove_padding(model)` before the trainer is built they
run, and give the numbers that they give with eager attention.
"""

from __future__ import annotations

from importlib import metadata

import pytest
from zoo.stack_models import build


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if not (_installed("trl").startswith("0.17.") and _installed("transformers").startswith("4.52.")):
    pytest.skip("needs TRL 0.17 and transformers 4.52: `nox -s stories`", allow_module_level=True)

import torch
from kit.story_data import examples, tokenizer
from peft import LoraConfig
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from trl_padfix import remove_padding


raises = pytest.raises(ValueError, match="batched generation with padding_side='right'")


@pytest.fixture(autouse=True, scope="module")
def flash():
    with flash_attention_stand_in():
        yield


def lora() -> LoraConfig:
    """Adapters that change the model from the start, so that policy and reference differ."""
    return LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0, init_lora_weights=False)


def trainer(kind: str, model, tmp_path, batch: int, **settings):
    trainer_class, config_class = {"dpo": (DPOTrainer, DPOConfig), "sft": (SFTTrainer, SFTConfig)}[kind]
    args = config_class(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        learning_rate=1e-2, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    torch.manual_seed(0)  # adapters are drawn in the trainer
    made = trainer_class(
        model=model,
        args=args,
        train_dataset=examples(kind),
        eval_dataset=examples(kind),
        processing_class=tokenizer(),
        **settings,
    )
    made.remove_callback(PrinterCallback)
    return made


def training_curve(made) -> torch.Tensor:
    made.train()
    return torch.tensor([[e["loss"], e["grad_norm"]] for e in made.state.log_history if "loss" in e])


def evaluation(made) -> torch.Tensor:
    metrics = made.evaluate()
    return torch.tensor([metrics[k] for k in sorted(metrics) if "time" not in k and "per_second" not in k])


def story(kind, act, batch, tmp_path, **settings):
    """`act` raises; with one line it does not, and its numbers are those of eager attention."""
    with raises:
        act(trainer(kind, build("qwen2", "flash_attention_2"), tmp_path, batch, **settings))

    model = build("qwen2", "flash_attention_2")
    handle = remove_padding(model)  # the one line
    found = act(trainer(kind, model, tmp_path, batch, **settings))

    expected = act(trainer(kind, build("qwen2", "eager"), tmp_path, batch, **settings))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert 0 < handle.stats.packed_tokens < handle.stats.padded_tokens


def test_dpo_full_model_training_step(tmp_path):
    story("dpo", training_curve, 2, tmp_path)


@pytest.mark.parametrize("batch", [1, 2])
def test_dpo_lora_evaluation(batch, tmp_path):
    story("dpo", evaluation, batch, tmp_path, peft_config=lora())


def test_sft_evaluation(tmp_path):
    story("sft", evaluation, 2, tmp_path)
