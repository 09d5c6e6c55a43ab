"""
A tiny random vision-language model of every image-text-to-text type that transformers knows, and batches for it.

Models are shrunk by the recipe of `families.py`; what it cannot know stands in `OVERRIDES`. How images are given to a
type is found by trying the few ways there are; how many tokens an image takes is asked of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from zoo import families
from zoo.families import NotBuiltError, tiny_config


__all__ = ["IMAGE", "Batch", "Row", "VisionModel", "build_vision", "vision_families"]

IMAGE, VIDEO, START, END = 50, 51, 52, 53
"""Ids of special tokens; text has ids from 3 to 49."""

_GRID_VISION = dict(
    depth=2, embed_dim=32, hidden_size=32, num_heads=4, intermediate_size=48, patch_size=4, spatial_merge_size=2,
    temporal_patch_size=2, in_channels=3, in_chans=3, out_hidden_size=32, deepstack_visual_indexes=[0, 1],
    num_position_embeddings=64, image_size=16,
)  # fmt: skip
_SQUARE_VISION = {"image_size": 16, "patch_size": 4, "num_hidden_layers": 2}

_TOKENS = {f"image_token_{kind}": IMAGE for kind in ("id", "index")}
_TOKENS |= {f"video_token_{kind}": VIDEO for kind in ("id", "index")}
_TOKENS |= {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "boi_token_index": START,
    "eoi_token_index": END,
}

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_HALF_ROPE = {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 0]}}
_WINDOWED = {"fullatt_block_indexes": [1], "window_size": 16}
_FIRST_LAYER = {"insert_layer_id": 0, "vision_config": {"insert_layer_id": 0}}
_TOKENS_OF_QUERIES = {"image_token_index": IMAGE, "image_token_id": IMAGE, "num_query_tokens": 4}
_MUSE = {"out_hidden_size": 128, "projector_hidden_size": 32}
_INKLING = {"vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32}}
_GEMMA4_VISION = dict(
    model_type="gemma4_vision", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, patch_size=4, pooling_kernel_size=2, position_embedding_size=16,
)  # fmt: skip
_TILED = {"image_grid_pinpoints": [[16, 32], [32, 16]]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "idefics3": {"scale_factor": 2},
    "smolvlm": {"scale_factor": 2},
    "internvl": {"image_seq_length": 4},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _TILED),
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    **{name: {"vision_config": _GEMMA4_VISION} for name in ("gemma4", "gemma4_unified")},
    "hyperclovax_vision_v2": {"vision_config": _WINDOWED},
    "qwen2_5_omni_thinker": {"vision_config": _WINDOWED, "text_config": _ROPE, "vision_start_token_id": START},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": START},
    "llama4": {
        "vision_config": {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
        | {"intermediate_size": 128}
    },
    "muse_glimmer": _MUSE,
    "muse_spark": _MUSE | {"audio_config": {"out_hidden_size": 32}},
    "janus": {"vision_config": {"projection_dim": 32}},
    "paligemma": {"projection_dim": 32, "vision_config": {"projection_dim": 32}},
    "kimi_k25": {"projection_hidden_size": 32},
    "nemotron_h_omni": {"vision_hidden_size": 32},
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {"image_size": 64, "patch_size": 4, "global_attn_indexes": [1], "window_size": 4}
    },
    **dict.fromkeys(("blip-2", "instructblip"), _TOKENS_OF_QUERIES),
    "exaone4_5": {"text_config": {"model_type": "exaone4"}, "vision_config": _WINDOWED},
    "granite_docling": {
        "vision_config": {"out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]}
    },
    **dict.fromkeys(("inkling2", "inkling2_loop"), _INKLING),
    "glm5_next": {"text_config": {"index_kpool": 2}},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _FIRST_LAYER),
    "dots3_note": {"vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "qwen2_5_vl": {"vision_config": _WINDOWED, "text_config": _ROPE},
    **{name: {"text_config": _ROPE} for name in ("qwen2_vl", "glm4v", "glm46v", "glm_ocr", "glmga")},
    **{name: {"text_config": _ROPE} for name in ("paddleocr_vl", "hunyuan_vl")},
    "glm4v_moe": {"text_config": _HALF_ROPE},
}
"""Fields of configs that the recipe cannot derive, merged into the fields of their parts."""

_TIMM = "Its vision tower comes from timm, which needs torchvision; neither is installed here."
_PARTS = "The recipe for tiny models does not know the fields by which the parts of its configuration fit one another."
_VOCABULARY = "Its images become tokens by a vocabulary that only its tokenizer has."
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(("apertus1p5", "chameleon", "emu3"), _VOCABULARY),
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), _TIMM),
    **dict.fromkeys(("deepseek_ocr2", "ernie4_5_vl_moe", "granite4_vision", "molmo2"), _PARTS),
    "diffusion_gemma": "It denoises blocks of tokens in both directions, and is no causal language model.",
    "evolla": "It takes proteins, not images.",
    "florence2": "It is an encoder-decoder model.",
    "inkling_mm_model": "It needs scipy, which is not installed here.",
}
"""Types of which no model is built, and why."""

NOT_RUN: dict[str, str] = {
    "blip": "Its text decoder looks at the image by cross-attention, and takes no image tokens.",
    "fuyu": "Its patches have a size of their own, which the recipe for tiny models does not reach.",
    "git": "Its decoder itself puts the features of an image before every row.",
    **dict.fromkeys(("idefics", "mllama"), "Its layers look at the image by cross-attention."),
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "A mask gives the positions of the features of an image."),
    "llama4": "Its own forward fails in transformers 5.24: its decoder returns no `image_outputs`.",
    "mistral4": "It takes text only.",
    "granite_docling": "It takes the crops of an image, and a plan of them, from its processor.",
    "instructblipvideo": "It takes videos.",
    "unlimited_ocr": "It takes the crops of an image, and a plan of them, from its processor.",
}
"""Types that are not given images, and why."""


@dataclass
class VisionModel:
    """A model and the way in which it is given images."""

    family: str
    model: PreTrainedModel
    image: Callable[[int], dict[str, torch.Tensor]] | None
    """Inputs of the image with a number, alone; `None` where no known way works."""
    counts: dict[int, int] = field(default_factory=dict)

    def tokens(self, image: int) -> int:
        """Tokens that an image takes."""
        if image not in self.counts:
            with torch.no_grad():
                features = _features(self.model, self.image(image))
            self.counts[image] = sum(f.reshape(-1, f.shape[-1]).shape[0] for f in features)
        return self.counts[image]


@dataclass(frozen=True)
class Row:
    """Text and images by turns: an `int` below 0 is image `-n`, others are token ids."""

    parts: tuple[int, ...]

    @property
    def images(self) -> list[int]:
        return [-p for p in self.parts if p < 0]


@dataclass
class Batch:
    """Rows as the inputs of a model."""

    ids: torch.Tensor
    mask: torch.Tensor
    inputs: dict[str, torch.Tensor]
    distinct: int
    """Prefixes of the rows that are distinct, an image being identified by its content."""

    def call(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask, **self.inputs}


def collate(vision: VisionModel, rows: list[Row], side: str = "right") -> Batch:
    """A padded batch of `rows`; `side` as in `models.batch`."""
    flat, prefixes = [], set()
    for row in rows:
        ids, content = [], []
        for part in row.parts:
            n = vision.tokens(-part) if part < 0 else 1
            ids += [START, *[IMAGE] * n, END] if part < 0 else [part]
            content += [START, *((part, i) for i in range(n)), END] if part < 0 else [part]
        flat.append(ids)
        prefixes |= {tuple(content[: i + 1]) for i in range(len(content))}
    length = max(map(len, flat))
    ids, mask = torch.zeros(2, len(flat), length, dtype=torch.int64)
    for i, row in enumerate(flat):
        room = length - len(row)
        begin = {"left": room, "right": 0}.get(side, room * (i % 2))
        ids[i, begin : begin + len(row)] = torch.tensor(row)
        mask[i, begin : begin + len(row)] = 1
    inputs = image_inputs(vision, [row.images for row in rows])
    types = (ids == IMAGE).long()
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = types
    if vision.family in ("gemma3", "shieldgemma2"):
        inputs["token_type_ids"] = types
    if vision.family == "paligemma":  # of the prefix, in which all tokens see each other, and of the rest
        last = (types * torch.arange(length)).amax(1, keepdim=True)
        inputs["token_type_ids"] = (torch.arange(length) > last).long()
    if vision.family in ("gemma4", "gemma4_unified", "minicpmv4_7"):
        inputs["mm_token_type_ids"] = types
    return Batch(ids, mask, inputs, len(prefixes))


def image_inputs(vision: VisionModel, images: list[list[int]]) -> dict[str, torch.Tensor]:
    """The inputs of the images of all rows."""
    each = [vision.image(i) for row in images for i in row]
    if not each:
        return {}
    # Patches of all images side by side, where their sizes are given.
    along = {"pixel_values": -1} if "target_sizes" in each[0] else {}
    joined = {name: torch.cat([inputs[name] for inputs in each], dim=along.get(name, 0)) for name in each[0]}
    pixels = joined["pixel_values"]
    if pixels.dim() == 5 and "image_sizes" not in joined:  # `(B, N, ...)`: rows padded with empty images
        most = max(map(len, images))
        joined["pixel_values"] = pixels.new_zeros(len(images), most, *pixels.shape[2:])
        flat = iter(pixels[:, 0])
        for i, row in enumerate(images):
            for j in range(len(row)):
                joined["pixel_values"][i, j] = next(flat)
    return joined


def vision_families() -> list[str]:
    """Every model type with an image-text-to-text model in transformers' auto mapping."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build_vision(family: str, attn_implementation: str | None = None, **given: Any) -> VisionModel:
    """A tiny random model of a type, in evaluation mode, and the way in which it takes images."""
    if family in NOT_BUILT:
        raise NotBuiltError(NOT_BUILT[family])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = tiny_config(CONFIG_MAPPING[family], _nested(family) | given)
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(config, attn_implementation=attn_implementation)
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    families._redraw(model)
    vision = VisionModel(family, model.float().eval(), None)
    for n in range(len(_ways(1))):
        vision.image, vision.counts = lambda image, n=n: _ways(image)[n], {}
        try:
            with torch.no_grad():
                for images in ([1], [1, 2]):
                    model(**collate(vision, [Row((3, *(-i for i in images), 4))]).call(), use_cache=False)
            return vision
        except Exception:  # not this way
            continue
    vision.image = None
    return vision


def _nested(family: str) -> dict[str, Any]:
    """The overrides of a type, on top of what the recipe makes of its parts."""
    fields = CONFIG_MAPPING[family]().to_dict()
    small = families._shrunk(fields)
    known = {name: value for name, value in _TOKENS.items() if name in fields}
    if isinstance(fields.get("vision_feature_layer"), int):
        known["vision_feature_layer"] = -1
    for name in ("vision_config", "text_config"):
        part = fields.get(name)
        if isinstance(part, dict):
            vision = _GRID_VISION if "temporal_patch_size" in part or "spatial_merge_size" in part else _SQUARE_VISION
            if isinstance(part.get("image_size"), list):
                vision = vision | {name: [vision[name]] * 2 for name in ("image_size", "patch_size")}
            known[name] = small[name] | {k: v for k, v in vision.items() if k in part and name == "vision_config"}
            known[name] |= {k: v for k, v in _TOKENS.items() if k in part}
            if "mrope_section" in (part.get("rope_parameters") or {}):
                known[name]["rope_parameters"] = part["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    for name, value in OVERRIDES.get(family, {}).items():
        known[name] = (known.get(name) or small.get(name) or {}) | value if isinstance(value, dict) else value
    return known


def _pixels(image: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(image))


@cache
def _ways(image: int) -> list[dict[str, torch.Tensor]]:
    """The inputs of an image in each way that is tried."""
    height, width = 2 * (1 + image % 2), 2 * (1 + image % 3)
    grid, square = torch.tensor([[1, height, width]]), _pixels(image, 1, 3, 16, 16)
    patches, sizes = _pixels(image, height * width, 3 * 2 * 4 * 4), torch.tensor([[4, 4 * (1 + image % 2)]])
    flat = patches[:, : 3 * 4 * 4]
    cubes, room = flat.unflatten(1, (3, 4, 4)), torch.zeros(1, 36, 48)
    room[0, : len(flat)] = flat
    filled = (torch.arange(36) < len(flat)).long()[None]
    tiled = torch.tensor([[16, 32] if image % 2 else [32, 16]])
    return [
        {"pixel_values": patches, "image_grid_thw": grid},
        {"pixel_values": square[None]},
        {"pixel_values": _pixels(image, 1, 3, 3, 16, 16), "image_sizes": tiled},
        {"pixel_values": square},
        {"pixel_values": square, "image_sizes": torch.tensor([[16, 16]])},
        {"pixel_values": flat, "image_grid_thw": grid},
        {"pixel_values": cubes, "image_grid_thw": grid},
        {"pixel_values": cubes[None], "image_grid_thw": grid},
        {"pixel_values": flat, "image_grid_thw": grid, "image_merge_sizes": torch.tensor([2])},
        {"pixel_values": flat, "image_grid_hw": grid[:, 1:]},
        {"pixel_values": square, "high_res_pixel_values": _pixels(image, 1, 3, 64, 64)},
        {"pixel_values": room, "spatial_shapes": grid[:, 1:], "pixel_attention_mask": filled},
        {"pixel_values": _pixels(image, 1, 16, 3 * 4 * 4), "image_position_ids": _places(4)},
        {"pixel_values": _pixels(image, 1, 4, 3 * 8 * 8), "image_position_ids": _places(2)},
        {"pixel_values": _pixels(image, 1, 3, 4, 4 * int(sizes.prod())), "target_sizes": sizes},
        {"pixel_values": square, "qformer_input_ids": torch.tensor([[3, 4, 5]])},
        {"pixel_values": _pixels(image, height * width, 8, 8, 3), "image_grid_thw": grid},
    ]


def _places(side: int) -> torch.Tensor:
    each = torch.arange(side)
    return torch.stack(torch.meshgrid(each, each, indexing="xy"), dim=-1).view(1, side * side, 2)


def _features(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    owner = model if hasattr(model, "get_image_features") else model.model
    output = owner.get_image_features(**inputs)
    features = output
    if hasattr(output, "pooler_output"):
        features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return list(features) if isinstance(features, list | tuple) else [features]
