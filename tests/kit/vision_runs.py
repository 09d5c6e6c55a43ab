"""
Tiny processors, and pairs and captions with images that are made on the spot.

The tokenizer has one token per word; its special tokens are those that the processors look for.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import transformers
from datasets import Dataset, Features, Image, List
from kit.methods import ONLINE, make_trainer
from PIL import Image as Pillow
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from zoo.vision_families import build_vision


__all__ = ["NEEDS_TORCHVISION", "PROCESSORS", "build_captions", "build_pairs", "build_processor", "build_vlm"]
__all__ += ["make_vision_trainer"]

WORDS = [f"w{i}" for i in range(3, 40)]
MARKS = [
    *("<image>", "<row_1_col_1>", "<global-img>", "<fake_token_around_image>", "<end_of_utterance>"),
    *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
]
"""Tokens that the processors put around images and in their place."""

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}<eos> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
"""A chat template, but for the placeholder of an image."""


def build_tokenizer(**names: str) -> PreTrainedTokenizerFast:
    """One token per word; images take one of `names`, for processors that ask the tokenizer."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{word: i + 3 for i, word in enumerate(WORDS)}}
    for word in ["user", "assistant", *MARKS, "system", "w1", "w2"]:
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=names
    )


_SIDE, _EDGE = {"height": 16, "width": 16}, {"longest_edge": 16}
_CROP = {"size": {"shortest_edge": 16}, "crop_size": _SIDE}
_LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "full"}
_IDEFICS = {"size": _EDGE, "max_image_size": _EDGE, "do_image_splitting": False}
_QWEN = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 24 * 24}}
_QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_QWEN_IMAGE = "<|vision_start|> <|image_pad|> <|vision_end|>"
_MARKS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}

PROCESSORS: dict[str, tuple] = {
    "llava": ("Llava", ("CLIP", _CROP), None, {}, "<image>", _LLAVA),
    "llava_next": (
        "LlavaNext",
        ("LlavaNext", _CROP | {"image_grid_pinpoints": [[16, 32], [32, 16]]}),
        None, {}, "<image>", _LLAVA,
    ),
    "idefics3": ("Idefics3", ("Idefics3", _IDEFICS), None, {}, "<image>", {"image_seq_len": 4}),
    "gemma3": (
        "Gemma3", ("Gemma3", {"size": _SIDE, "do_pan_and_scan": False}), None,
        {"boi_token": "<img>", "eoi_token": "</img>", "image_token": "<IMG_CONTEXT>"}, "<img>",
        {"image_seq_length": 4},
    ),
    "smolvlm": (
        "SmolVLM", ("SmolVLM", _IDEFICS),
        ("SmolVLM", {"size": _EDGE, "max_image_size": _EDGE, "video_sampling": {"fps": 1, "max_frames": 2}}),
        {}, "<image>", {"image_seq_len": 4},
    ),
    "internvl": (
        "InternVL", ("GotOcr2", {"size": _SIDE, "crop_to_patches": False}), ("InternVL", {"size": _SIDE}),
        _MARKS | {"video_token": "<video>"}, "<IMG_CONTEXT>", {"image_seq_length": 4},
    ),
    "qwen2_vl": ("Qwen2VL", ("Qwen2VL", _QWEN), ("Qwen2VL", {"patch_size": 4}), _QWEN_TOKENS, _QWEN_IMAGE, {}),
    "qwen2_5_vl": ("Qwen2_5_VL", ("Qwen2VL", _QWEN), ("Qwen2VL", {"patch_size": 4}), _QWEN_TOKENS, _QWEN_IMAGE, {}),
    "qwen3_vl": ("Qwen3VL", ("Qwen2VL", _QWEN), ("Qwen3VL", {"patch_size": 4}), _QWEN_TOKENS, _QWEN_IMAGE, {}),
}  # fmt: skip
"""
For each family: the names of the processors of text, of images and of videos, their settings, the tokens of
images that its tokenizer knows, what a template writes for an image, and more settings.
"""
NEEDS_TORCHVISION = {"smolvlm", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
"""Their video processors are torchvision's."""


class _WithoutVideos(transformers.Qwen2_5_VLProcessor):
    """The processor without the part that needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.video_processor = None
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


def build_processor(family: str, with_videos: bool = True) -> ProcessorMixin:
    name, (images, sizes), videos, names, placeholder, more = PROCESSORS[family]
    parts = [getattr(transformers, f"{images}ImageProcessorPil")(**sizes), build_tokenizer(**names)]
    parts += [getattr(transformers, f"{videos[0]}VideoProcessor")(**videos[1])] if videos and with_videos else []
    template = TEMPLATE.replace("IMAGE", placeholder)
    if videos and not with_videos:
        return _WithoutVideos(*parts, chat_template=template, **more)
    return getattr(transformers, f"{name}Processor")(*parts, chat_template=template, **more)


def build_vlm(
    family: str, processor: ProcessorMixin, attn_implementation: str | None = None, **more: Any
) -> PreTrainedModel:
    """A model of the family for a processor, its weights large."""
    tokenizer = processor.tokenizer
    ids = {"image_token_id": _image_token_id(processor), "image_token_index": _image_token_id(processor)}
    for name, word in {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}.items():
        ids[name] = tokenizer.convert_tokens_to_ids(word)
    ids["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]().to_dict()
    model = build_vision(family, attn_implementation, **{k: v for k, v in ids.items() if k in known}, **more).model
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def _image_token_id(processor: ProcessorMixin) -> int:
    if getattr(processor, "boi_token", None):  # Gemma's processors call the mark before an image their image token
        return processor.tokenizer.image_token_id
    return getattr(processor, "image_token_id", None) or processor.tokenizer.context_image_token_id


def build_image(draw: random.Random, width: int = 16, height: int = 16) -> Pillow.Image:
    """A picture of noise."""
    noise = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (height, width, 3))
    return Pillow.fromarray(noise.astype(np.uint8))


def build_pairs(count: int, images: tuple[int, ...] = (1,), seed: int = 0) -> Dataset:
    """Ragged conversational pairs; row `i` has `images[i % len(images)]` images."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        rows.append(
            {
                "images": _pictures(draw, images[i % len(images)]),
                "prompt": [{"role": "user", "content": _text(draw, 1, 9)}],
                "chosen": [{"role": "assistant", "content": _text(draw, 1, 9)}],
                "rejected": [{"role": "assistant", "content": _text(draw, 1, 9)}],
            }
        )
    text = Dataset.from_list([{k: v for k, v in row.items() if k != "images"} for row in rows])
    columns = {name: text[name] for name in text.column_names} | {"images": [row["images"] for row in rows]}
    return Dataset.from_dict(columns, features=Features({**text.features, "images": List(Image())}))


def build_captions(count: int, images: tuple[int, ...] = (1,), seed: int = 0) -> Dataset:
    """Ragged conversational prompts and completions with images."""
    return build_pairs(count, images, seed).remove_columns("rejected").rename_column("chosen", "completion")


def _text(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


def _pictures(draw: random.Random, count: int) -> list[Pillow.Image]:
    return [build_image(draw, 16 + 8 * draw.randint(0, 1), 16 + 8 * draw.randint(0, 1)) for _ in range(count)]


def make_vision_trainer(library: Any, kind: str, family: str, folder: Any, **given: Any) -> Any:
    """As [`make_trainer`], on a model of a family and its processor; nothing is cut off."""
    processor = given.setdefault("processing_class", build_processor(family))
    wanted = ["model", *{"DPO": ["ref_model"], "KTO": ["ref_model"], "Distillation": ["teacher_model"]}.get(kind, [])]
    without = {"ref_model"} if given.get("peft_config") else set()
    given = {name: build_vlm(family, processor) for name in wanted if name not in without | given.keys()} | given
    length = {} if kind in ONLINE else {"max_length": None}
    return make_trainer(library, kind, folder, **length | given)
