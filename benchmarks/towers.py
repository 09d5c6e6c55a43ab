"""
Time a forward and backward on pairs about one image: padded, packed, and packed with one run of the tower per pair.

    python benchmarks/towers.py

A random LLaVA: CLIP with 6 layers of 384, Qwen2 with 6 layers of 512; 2 pairs, each about one image of 256 tokens. One
thread; steps alternate; medians of CPU time. If losses or gradients differ, there are no figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from unittest import mock

import torch
import transformers

from trl_padfix import remove_padding
from trl_padfix.core.patches.towers import TowerPatch


IMAGE, VOCABULARY, PROMPT, ANSWER = 8191, 8192, 40, 60
SIDE, PATCH = 224, 14


def build_llava() -> transformers.LlavaForConditionalGeneration:
    vision = transformers.CLIPVisionConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6,
        image_size=SIDE, patch_size=PATCH,
    )  # fmt: skip
    text = transformers.Qwen2Config(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, pad_token_id=0,
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config).train()


def build_batch(pairs: int) -> dict[str, torch.Tensor]:
    """Chosen rows, then rejected rows; both halves have the same images and prompts."""
    images = torch.full((2 * pairs, (SIDE // PATCH) ** 2), IMAGE)
    prompts, answers = torch.randint(1, 8000, (pairs, PROMPT)), torch.randint(1, 8000, (2 * pairs, ANSWER))
    ids = torch.cat([images, prompts.repeat(2, 1), answers], dim=1)
    lengths = torch.linspace(ids.shape[1] - ANSWER // 2, ids.shape[1], 2 * pairs).round()
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    is_answer = torch.arange(ids.shape[1]) >= ids.shape[1] - ANSWER
    labels = ids.masked_fill(~(is_answer & (mask == 1)), -100)
    pixels = torch.randn(pairs, 3, SIDE, SIDE).repeat(2, 1, 1, 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "pixel_values": pixels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each variant")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch = build_llava(), build_batch(options.pairs)
    handle = remove_padding(model, prefix_sharing=True)
    as_in_trl = mock.patch.object(TowerPatch, "packed", lambda patch, *args, **kwargs: patch.wrapped(*args, **kwargs))
    variants = {"padded": handle.disabled, "packed": lambda: as_in_trl, "packed, one tower run per pair": nullcontext}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(options.steps + 1):
        for name, block in variants.items():
            model.zero_grad()
            copies = {k: v.clone() for k, v in batch.items()}
            start = time.process_time()
            with block():
                loss = model(**copies).loss
                loss.backward()
            if step:  # the first warms up, and tests whether the tower separates the halves
                seconds[name].append(time.process_time() - start)
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            found[name] = loss.detach(), gradients
    for name, (loss, gradients) in found.items():
        expected_loss, expected = found["padded"]
        if not torch.isclose(loss, expected_loss, rtol=1e-5) or (gradients - expected).norm() > 1e-4 * expected.norm():
            raise RuntimeError(f"{name}: loss or gradients are not those of the padded step.")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.2f} s, {medians['padded'] / median:.2f}x")


if __name__ == "__main__":
    main()
