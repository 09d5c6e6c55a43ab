"""GRPO, RLOO, distillation and KTO on images: TRL's trajectory, generation included, whatever the mode."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import trl
import trl.trainer.kto_trainer as trl_kto
from datasets import Dataset
from kit.observe import accept_hooks, has_cache
from kit.trainer_runs import MODES, assert_other, assert_same, break_mode, trained
from kit.vision_runs import build_captions, build_processor, build_vlm, make_vision_trainer

import trl_padfix


pytestmark = pytest.mark.skipif(
    not hasattr(trl_kto, "DataCollatorForVisionUnpairedPreference"), reason="this TRL takes no images in KTO"
)
IMAGES = (1, 2, 0)
SCATTERED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


def reward_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that tells completions apart by their tokens."""
    return [sum(7 * i % 11 for i in ids) / 44 for ids in completion_ids]


def build_data(kind: str, count: int, seed: int = 0) -> Dataset:
    # TRL's distillation takes no row without images beside rows with some.
    data = build_captions(count, IMAGES[:2] if kind == "Distillation" else IMAGES, seed)
    if kind != "KTO":
        return data.remove_columns("completion")
    return data.add_column("label", [i % 3 != 0 for i in range(count)])


def build_trainer(library: Any, kind: str, family: str, tmp_path: Any, **given: Any) -> Any:
    given = {"max_steps": 2, "train_dataset": build_data(kind, 9)} | given
    if kind == "KTO":
        given = {"per_device_train_batch_size": 3} | given
    else:
        given = {"max_completion_length": 6} | ({} if kind == "Distillation" else {"beta": 0.0}) | given
        if family == "gemma3":
            given |= {"temperature": 8.0}  # its tiny model is so sure that all completions of a prompt are one
        if kind == "Distillation":
            given["teacher_model"] = build_vlm(family, build_processor(family))
            given["teacher_model"].lm_head.weight.data.mul_(2)
        else:
            given["reward_funcs"] = reward_tokens
    return make_vision_trainer(library, kind, family, tmp_path, **given)


def trajectory(trainer: Any) -> torch.Tensor:
    # Of distillation `entropy` is a mean over micro-batches, which a budget and shared prompts make other ones.
    reward = {"KTO": "kl", "Distillation": "num_tokens"}.get(type(trainer).__name__.removesuffix("Trainer"), "reward")
    return trained(trainer, reward)


@cache
def trls(kind: str, family: str, scattered: bool) -> torch.Tensor:
    return trajectory(build_trainer(trl, kind, family, "unused", **(SCATTERED if scattered else {})))


CELLS = [
    ("llava", "GRPO", "prefix sharing"),
    ("llava", "RLOO", "padding-free"),
    ("llava", "KTO", "prefix sharing"),
    ("llava", "Distillation", "padding-free"),
    pytest.param("gemma3", "GRPO", "prefix sharing", marks=pytest.mark.slow),
    pytest.param("gemma3", "KTO", "padding-free", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "kind", "mode"), CELLS)
def test_training_on_images_is_trls(family, kind, mode, tmp_path):
    scattered = kind != "KTO"
    config = MODES[mode] | (SCATTERED if scattered else {})
    expected = trls(kind, family, scattered)  # before the trainer is built, which seeds what is drawn
    trainer = build_trainer(trl_padfix, kind, family, tmp_path, **config)
    assert_same(trajectory(trainer), expected, atol=1e-4)
    assert (expected[:, 1] > 0).all()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    assert log["padfix/pad_fraction"] > 0
    assert (log["padfix/shared_fraction"] > 0) == (mode == "prefix sharing")


@pytest.mark.parametrize(("kind", "mode"), [("GRPO", "prefix sharing"), ("KTO", "padding-free")])
def test_a_token_budget_splits_rows_with_images(kind, mode, tmp_path, monkeypatch):
    expected = trls(kind, "llava", kind != "KTO")
    config = {"max_tokens_per_batch": 64, "parity_check": False} | (SCATTERED if kind != "KTO" else {})
    trainer = build_trainer(trl_padfix, kind, "llava", tmp_path, **config, **MODES[mode])
    computed = []
    decoder = trainer.model.get_decoder()
    decoder.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: None if has_cache(kwargs) else computed.append(args[0].shape[:2].numel()),
        with_kwargs=True,
    )
    accept_hooks(trainer.model)
    assert_same(trajectory(trainer), expected, atol=1e-4)
    assert 0 < max(computed) <= 64
    assert len(computed) > 4
    config |= break_mode(monkeypatch, mode)
    monkeypatch.setattr("trl_padfix.core.call.images.token_keys", lambda call, shape: None)
    assert_other(trajectory(build_trainer(trl_padfix, kind, "llava", tmp_path, **config)), expected, atol=1e-4)
