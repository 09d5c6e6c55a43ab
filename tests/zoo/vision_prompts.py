"""Tiny random vision-language models that continue prompts with images, and their processors, without torchvision."""

from __future__ import annotations

import random

import transformers
from kit import vision_runs
from PIL import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin


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


def build_tokenizer(image: str, **names: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per word, with a chat template that writes `image` for an image."""
    tokenizer = vision_runs.build_tokenizer(**names)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


def build_processor(name: str) -> ProcessorMixin:
    """A processor for `"llava"` or `"qwen2_5_vl"`."""
    _, (images, sizes), _, names, placeholder, more = vision_runs.PROCESSORS[name]
    tokenizer = build_tokenizer(placeholder, **names)
    kind = {"llava": transformers.LlavaProcessor, "qwen2_5_vl": _WithoutVideos}[name]
    images = getattr(transformers, f"{images}ImageProcessorPil")(**sizes)
    return kind(images, tokenizer, chat_template=tokenizer.chat_template, **more)


class _WithoutVideos(transformers.Qwen2_5_VLProcessor):
    """The processor without the part that needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.video_processor = None
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


def build_vision_model(name: str) -> PreTrainedModel:
    """The model of the processor of that name, in evaluation mode; it continues with words."""
    processor = build_processor(name)
    model, tokenizer = vision_runs.build_vlm(name, processor), processor.tokenizer
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    spoken = {*tokenizer.convert_tokens_to_ids(vision_runs.WORDS), tokenizer.eos_token_id}
    size = model.config.get_text_config().vocab_size
    model.generation_config.suppress_tokens = [i for i in range(size) if i not in spoken]
    return model


def build_image(seed: int) -> Image.Image:
    """Noise of one of two sizes."""
    return vision_runs.build_image(random.Random(seed), 16, 16 + 8 * (seed % 2))
