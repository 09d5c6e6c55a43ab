"""
Time saved by running a vision tower once for a pair instead of once for each of its rows.

A step of a small Qwen2.5-VL (its tower a quarter of the parameters, prefix sharing on) with and without `TowerPatch`,
in turns, in seconds of one CPU thread:

    python docs/bench/towers.py
"""

from __future__ import annotations

import statistics
import time
from unittest import mock

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from trl_padfix import remove_padding
from trl_padfix.core import remove


IMAGE, BEGIN, END = 1990, 1991, 1992


def build() -> Qwen2_5_VLForConditionalGeneration:
    """7 million parameters in the tower, 20 million beside it."""
    torch.manual_seed(0)
    text = dict(
        vocab_size=2000, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096,
        rope_scaling={"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
    )  # fmt: skip
    vision = dict(
        hidden_size=256, intermediate_size=768, depth=6, num_heads=4, out_hidden_size=512, patch_size=14,
        spatial_merge_size=2, temporal_patch_size=2, window_size=112, fullatt_block_indexes=list(range(6)),
    )  # fmt: skip
    tokens = dict(image_token_id=IMAGE, vision_start_token_id=BEGIN, vision_end_token_id=END, video_token_id=1993)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    ).train()


def batch(pairs: int, side: int, answer: int = 60) -> dict[str, torch.Tensor]:
    """`[chosen, rejected]` rows, each pair with an image of `side x side` patches before its prompt."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randn(pairs * side * side, 3 * 2 * 14 * 14, generator=draw)
    image = torch.tensor([BEGIN, *[IMAGE] * (side * side // 4), END])
    prompts = [torch.cat([image, torch.randint(5, 1900, (40,), generator=draw)]) for _ in range(pairs)]
    rows = [
        torch.cat([prompt, torch.randint(5, 1900, (answer + 7 * i + 11 * k,), generator=draw)])
        for k in range(2)
        for i, prompt in enumerate(prompts)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.cat([pixels, pixels]),
        "image_grid_thw": torch.tensor([[1, side, side]] * (2 * pairs)),
    }


def main() -> None:
    torch.set_num_threads(1)
    model = build()
    for pairs, side in ((3, 16), (2, 32)):
        inputs = batch(pairs, side)
        times: dict[str, list[float]] = {"once for a pair": [], "once for each row": []}
        for _ in range(5):
            for mode, seconds in times.items():
                towers = remove.towers if mode == "once for a pair" else lambda *_: []
                with mock.patch.object(remove, "towers", towers), remove_padding(model, prefix_sharing=True):
                    model.zero_grad()
                    begin = time.process_time()
                    model(**inputs).logits.square().mean().backward()
                    seconds.append(time.process_time() - begin)
        once, each = (statistics.median(seconds[1:]) for seconds in times.values())
        print(
            f"{pairs} pairs, {side} x {side} patches: {each:.2f} s each row, {once:.2f} s a pair, {each / once:.2f}x"
        )


if __name__ == "__main__":
    main()
