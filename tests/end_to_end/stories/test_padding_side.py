"""Failures of padding_side='right', executed: code that raises an error, and the same code with the package."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if not (_installed("trl").startswith("0.17.") and _installed("transformers").startswith("4.52.")):
    pytest.skip("needs TRL 0.17 and transformers 4.52: `nox -s stories`", allow_module_level=True)

import torch
from kit.observe import each_row_alone
from kit.tolerance import assert_close
from simulated_gpu.flash_stand_in import flash_attention_stand_in
from transformers import (
    AutoModelForSequenceClassification,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    modeling_flash_attention_utils,
)
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from zoo.stack_models import EOS, PAD, build, logps

from trl_padfix import remove_padding


CALL = "logits = model(sequences, attention_mask=attention_mask).logits"
REWARD_MODEL = [
    """
reward_model = AutoModelForSequenceClassification.from_pretrained(
    path, num_labels=1, attn_implementation="flash_attention_2"
)
rewards = reward_model(sequences, attention_mask=attention_mask).logits
""",
    """
remove_padding(reward_model, pool_last_token=True)
rewards = reward_model(sequences, attention_mask=attention_mask).logits
""",
]
GENERATION = [
    """
inputs = processor(text=prompts, images=images, padding=True, return_tensors="pt")
answers = vision_model.generate(**inputs, max_new_tokens=6)
""",
    """
from trl_padfix import generate

answers = generate(vision_model, inputs, max_new_tokens=6)
""",
]
STORIES = {
    "an actor": [CALL, f"from trl_padfix import remove_padding\n\nremove_padding(model)\n{CALL}"],
    "a reward model": REWARD_MODEL,
    "generation": GENERATION,
}
"""For each, code that raises an error, and code that does not."""

PROMPTS = [[6, 4, 4, 4, 4, 7, 10, 11, 12, 13], [6, 4, 4, 4, 4, 7, 14], [6, 4, 4, 4, 4, 7, 20, 21, 22]]
"""With an image of four tokens each."""

PIXELS = torch.randn(len(PROMPTS) * 16, 96, generator=torch.Generator().manual_seed(0))


def process(text, images, **settings):
    """A batch of prompts as the processor of Qwen2.5-VL makes it, padded right."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p) for p in text], batch_first=True, padding_value=PAD)
    grid = torch.tensor([[1, 4, 4]] * len(text))
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "pixel_values": images, "image_grid_thw": grid}


def build_vision_model():
    """A tiny Qwen2.5-VL; its vision tower wants the rotary kernel of FlashAttention, and runs without."""
    config = Qwen2_5_VLConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=0,
        rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
        image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7,
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2,
        },
    )  # fmt: skip
    parts = {"vision_config": "sdpa", "text_config": "flash_attention_2"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation=parts).eval()


@contextmanager
def flash_attention():
    """FlashAttention 2, also for Qwen2.5-VL, which looks for it when it is imported."""
    flash = modeling_flash_attention_utils
    with flash_attention_stand_in():
        used = {
            "_flash_attention_forward": flash._flash_attention_forward,
            "flash_attn_supports_top_left_mask": flash.flash_attn_supports_top_left_mask,
        }
        with mock.patch.multiple(modeling_qwen2_5_vl, create=True, **used):
            yield


@pytest.fixture
def names():
    """What the stories take for granted."""
    with flash_attention():
        sequences = torch.tensor([[PAD, 5, 6, 13, 14, PAD], [7, 8, 9, 15, PAD, PAD], [PAD, PAD, 4, 2, 8, 9]])
        yield {
            "AutoModelForSequenceClassification": SimpleNamespace(
                from_pretrained=lambda path, attn_implementation, **settings: build(
                    "qwen2", attn_implementation, AutoModelForSequenceClassification, **settings
                )
            ),
            "attention_mask": (sequences != PAD).long(),
            "images": PIXELS,
            "model": build("qwen2", "flash_attention_2"),
            "path": "a model",
            "processor": process,
            "prompts": PROMPTS,
            "remove_padding": remove_padding,
            "sequences": sequences,
            "vision_model": build_vision_model(),
        }


@pytest.mark.parametrize("story", STORIES)
def test_story(story, names):
    before, after = STORIES[story]
    with pytest.raises(ValueError, match="batched generation with padding_side='right'"):
        exec(before, names)
    exec(after, names)
    model, sequences, mask = names["model"], names["sequences"], names["attention_mask"]
    if "logits" in names:
        expected = each_row_alone(
            lambda row, ones: logps(model(row, attention_mask=ones).logits, row, ones), sequences, mask
        )
        assert_close(logps(names["logits"], sequences, mask), expected, terms=64, depth=16)
    if "answers" in names:
        for i, prompt in enumerate(PROMPTS):
            inputs = process([prompt], PIXELS[16 * i : 16 * (i + 1)])
            expected = names["vision_model"].generate(**inputs, max_new_tokens=6)[0, len(prompt) :]
            assert names["answers"][i, max(map(len, PROMPTS)) :].tolist() == expected.tolist()
