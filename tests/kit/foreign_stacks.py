"""Tiny models, data on disk and logs, for tests that start other stacks by their own entry points."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer
from trl_padfix.versions import installed_version


TEXTS = ["".join(chr(97 + (7 * i + j) % 26) for j in range(3)) for i in range(40)]
STEPS = 10


def of_stack(package: str) -> list[pytest.MarkDecorator]:
    """Marks of tests that run in an environment with another stack, one of `nox -s plugins`."""
    reason = f"{package} is not installed (`nox -s plugins`)"
    return [pytest.mark.slow, pytest.mark.skipif(installed_version(package) is None, reason=reason)]


def words(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(TEXTS, k=draw.randint(low, high)))


def save_model(folder: Path, room: int = 8, tied: bool = True) -> Path:
    """
    A random Qwen2 and its tokenizer, as a model folder; its weights are large, so that attention is sharp.

    The vocabulary has `room` for tokens that another tokenizer class adds (Qwen2's: `<|endoftext|>`). Without, axolotl
    draws their embeddings at random, others in each run, and in the reference than in the policy.
    """
    tokenizer = train_tokenizer([" ".join(TEXTS)] * 3, vocab_size=400)
    shape = SHAPES["tiny"] | {"vocab_size": len(tokenizer) + room, "initializer_range": 0.1}
    model = build_qwen2(tokenizer, **shape)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


IMAGE, VIDEO = 151655, 151656
"""Ids of the placeholders of Qwen2.5-VL, which ms-swift does not read from the configuration."""


def save_vision_model(folder: Path) -> Path:
    """A random Qwen2.5-VL and its processor, as a model folder, with a tokenizer of few words and Qwen's ids."""
    vocabulary = {"<|im_start|>": 500, "<|im_end|>": 501, "<|vision_start|>": 502, "<|vision_end|>": 503}
    vocabulary |= {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO}
    parts = json.loads(train_tokenizer([" ".join(TEXTS)] * 3, vocab_size=400).backend_tokenizer.to_str())
    parts["model"]["vocab"] |= vocabulary
    special = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "additional_special_tokens": [*vocabulary]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(parts)), **special)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == IMAGE
    shape = {"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 56 * 56}
    images, videos = transformers.Qwen2VLImageProcessorPil(**shape), transformers.Qwen2VLVideoProcessor(**shape)
    transformers.Qwen2_5_VLProcessor(images, tokenizer, videos).save_pretrained(folder)
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    text = {"vocab_size": VIDEO + 9, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "tie_word_embeddings": True}
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision | {"fullatt_block_indexes": [1]},
        text_config=text | {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id},
        tie_word_embeddings=True, image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=502,
        vision_end_token_id=503,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    return folder


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def preferences(count: int = 40, seed: int = 0) -> list[dict[str, str]]:
    """`prompt`, `chosen`, `rejected`, of very different lengths."""
    draw = random.Random(seed)
    return [
        {"prompt": words(draw, 4, 30), "chosen": words(draw, 1, 12), "rejected": words(draw, 1, 12)}
        for _ in range(count)
    ]


def run(*command: str, folder: Path, **environment: str) -> str:
    """The output of a command of the environment that the tests run in; a failure shows it."""
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


def logged(output_dir: Path) -> list[dict[str, float]]:
    """The logs of a trainer, read from its last checkpoint."""
    found = sorted(output_dir.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(found[-1].read_text())["log_history"]


def assert_equal_steps(ours: list[dict], theirs: list[dict]) -> None:
    """The same losses and gradient norms in ten steps, before the first update to rounding."""
    assert len(ours) == len(theirs) == STEPS
    for name in ("loss", "grad_norm"):
        found, wanted = ([float(log[name]) for log in logs] for logs in (ours, theirs))
        assert max(wanted) > 1e-3
        apart = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        print(f"{name}: at most {apart:.1e} apart, of {max(wanted):.4g}")
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-5, atol=1e-6)


def assert_equal_steps_of_fewer_tokens(ours: list[dict], theirs: list[dict], shares: bool = True) -> None:
    """The same steps, and a log of what was not computed."""
    steps, expected = ([log for log in logs if "grad_norm" in log] for logs in (ours, theirs))
    assert_equal_steps(steps, expected)
    assert all("padfix/pad_fraction" not in log for log in theirs)
    assert all((log["padfix/shared_fraction"] > 0) is shares for log in steps)
    computed = [(1 - log["padfix/pad_fraction"]) * (1 - log["padfix/shared_fraction"]) for log in steps]
    assert all(0 < part < 1 for part in computed)
    print(f"{sum(computed) / STEPS:.0%} of the padded tokens computed")
