"""Tiny random vision-language models and their processors, built offline and without torchvision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)


SPECIAL = [
    "<bos>",
    "<eos>",
    "<pad>",
    "<image>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
]
ROLES = ["system:", "user:", "assistant:"]
WORDS = [f"w{i}" for i in range(30)]
IDS = {token: i for i, token in enumerate([*SPECIAL, *ROLES, *WORDS])}

TEMPLATE = """
{%- for message in messages -%}
{{ message.role }}: {% if message.content is string %}{{ message.content }} {% else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}IMAGE {% else -%}{{ part.text }} {% endif -%}
{%- endfor -%}{%- endif -%}
{%- if message.role == 'assistant' -%}<eos> {% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}assistant: {% endif -%}
"""

_TEXT: dict[str, Any] = {
    "vocab_size": len(IDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def build_tokenizer(image: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per word, with a chat template that writes `image` for an image."""
    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    built.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    built.chat_template = TEMPLATE.replace("IMAGE", image)
    return built


def build_processor(name: str) -> ProcessorMixin:
    """A processor for `"llava"` or `"qwen2_5_vl"`."""
    if name == "llava":
        tokenizer = build_tokenizer("<image>")
        tokenizer.image_token, tokenizer.image_token_id = "<image>", IDS["<image>"]
        size = {"height": 16, "width": 16}
        images = CLIPImageProcessorPil(size=size, crop_size=size)
        return LlavaProcessor(
            images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
            chat_template=tokenizer.chat_template, num_additional_image_tokens=1,
        )  # fmt: skip
    tokenizer = build_tokenizer("<|vision_start|> <|image_pad|> <|vision_end|>")
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    return _WithoutVideos(images, tokenizer, chat_template=tokenizer.chat_template)


class _WithoutVideos(Qwen2_5_VLProcessor):
    """The processor without the part that needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.video_processor = None
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


def build_vision_model(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    """The model of the processor of that name, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "llava":
            vision = CLIPVisionConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                patch_size=8, projection_dim=16, initializer_range=0.2,
            )  # fmt: skip
            config = LlavaConfig(
                vision_config=vision, text_config=LlamaConfig(**_TEXT), image_token_id=IDS["<image>"],
                image_seq_length=4, vision_feature_layer=-1,
            )  # fmt: skip
            cls: Any = LlavaForConditionalGeneration
        else:
            config = Qwen2_5_VLConfig(
                vision_config={
                    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
                    "patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
                },
                text_config=_TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
                image_token_id=IDS["<|image_pad|>"],
                video_token_id=IDS["<|video_pad|>"],
                vision_start_token_id=IDS["<|vision_start|>"],
                vision_end_token_id=IDS["<|vision_end|>"],
            )  # fmt: skip
            cls = Qwen2_5_VLForConditionalGeneration
        model = cls._from_config(config, attn_implementation=implementation).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        model.generation_config.pad_token_id = 2
        model.generation_config.suppress_tokens = [i for i in range(IDS["w0"]) if i != IDS["<eos>"]]
        return model


def build_image(seed: int) -> Image.Image:
    """Noise of one of a few sizes."""
    draw = np.random.default_rng(seed)
    side = 16 + 8 * (seed % 2)
    return Image.fromarray(draw.integers(0, 255, (side, 16, 3), dtype=np.uint8))
