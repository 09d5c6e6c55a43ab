"""`swift sft` and `swift rlhf`, of text and of images."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from kit.foreign_stacks import (
    STEPS,
    assert_equal_steps_of_fewer_tokens,
    logged,
    of_stack,
    preferences,
    run,
    save_model,
    save_vision_model,
    write_lines,
)
from PIL import Image
from simulated_gpu.torchvision_stand_in import torchvision_loads

from trl_padfix import PaddingRemovalError


pytestmark = of_stack("ms-swift")

REWARD = """
from swift.rewards import ORM, orms

class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(completion)) for completion in completions]

orms["length"] = Length
"""
SHIPPED = subprocess.check_output([sys.executable, "-m", "trl_padfix.integrations.swift.padfix"], text=True).strip()
"""The file that the page names."""
LOAD_TORCHVISION = f"""
import sys

sys.path.append({str(Path(__file__).parents[1])!r})
from simulated_gpu.torchvision_stand_in import torchvision_loads

torchvision_loads()
sys.path.pop()
"""
"""What every process begins with, as `sitecustomize`: ms-swift imports torchvision where images are."""

METHODS = {
    "sft": ("sft",),
    "dpo": ("rlhf", "--rlhf_type", "dpo"),
    "kto": ("rlhf", "--rlhf_type", "kto"),
    "rm": ("rlhf", "--rlhf_type", "rm"),
    "grpo": (
        "rlhf", "--rlhf_type", "grpo", "--num_generations", "4", "--max_completion_length", "12",
        "--reward_funcs", "length", "--temperature", "1.0", "--beta", "2", "--per_device_train_batch_size", "8",
    ),
}  # fmt: skip
MODELS = {
    "text": ("--model_type", "qwen2", "--template", "dummy"),
    "images": ("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"),
}


def rows(method: str, kind: str = "text") -> list[dict]:
    found = []
    for i, row in enumerate(preferences(100)):
        asked = [{"role": "user", "content": "<image>" * (kind == "images") + row["prompt"]}]
        answer = [{"role": "assistant", "content": row["chosen"]}]
        more = {"rejected_response": row["rejected"]} if method in ("dpo", "rm") else {}
        more |= {"label": bool(i % 2)} if method == "kto" else {}
        more |= {"images": [f"{i % 5}.png"]} if kind == "images" else {}
        found.append({"messages": asked + (answer if method != "grpo" else []), **more})
    return found


def prepare(folder, method: str, kind: str = "text") -> None:
    """Model, data and plug-ins of a run."""
    (save_model if kind == "text" else save_vision_model)(folder / "model")
    write_lines(folder / "rows.jsonl", rows(method, kind))
    draw = np.random.default_rng(0)
    for i in range(5):  # of one to four tokens
        pixels = draw.integers(0, 255, (28 * (1 + i % 2), 28 * (1 + i // 2 % 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "reward.py").write_text(REWARD)
    (folder / "sitecustomize.py").write_text(LOAD_TORCHVISION)


def train(folder, method: str, callback: str | None, *more: str, kind="text", name="run") -> tuple[list[dict], str]:
    plugins = ["reward.py"] * (method == "grpo") + [SHIPPED] * bool(callback)
    kind_of_training, *of_method = METHODS[method]
    command = [
        "swift", kind_of_training, "--model", "model", *MODELS[kind],
        "--tuner_type", "full", "--torch_dtype", "float32", "--attn_impl", "sdpa", "--dataset", "rows.jsonl",
        "--max_steps", str(STEPS), "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1",
        "--learning_rate", "1e-4", "--lr_scheduler_type", "constant", "--logging_steps", "1",
        "--save_steps", str(STEPS),
        "--gradient_checkpointing", "false", "--report_to", "none", "--output_dir", name,
        *(["--external_plugins", *plugins] if plugins else []),
        *(["--callbacks", callback] if callback else []), *of_method, *more,
    ]  # fmt: skip
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = run(*command, folder=folder, MODELSCOPE_CACHE=str(folder / "hub"), PYTHONPATH=paths)
    return logged(folder / name), said


CALLBACKS = {"dpo": "padfix_sharing", "grpo": "padfix_auto", "rm": "padfix_sharing_unchecked"}

NEEDS_TORCHVISION = pytest.mark.skipif(not torchvision_loads(), reason="Qwen2.5-VL's processor needs torchvision")
KINDS = ["text", pytest.param("images", marks=NEEDS_TORCHVISION)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_callback_removes_padding(method, kind, tmp_path):
    prepare(tmp_path, method, kind)
    callback = CALLBACKS.get(method, "padfix") if kind == "text" else "padfix"
    theirs, _ = train(tmp_path, method, None, kind=kind, name="theirs")
    ours, said = train(tmp_path, method, callback, kind=kind, name="ours")
    assert_equal_steps_of_fewer_tokens(ours, theirs, shares=callback != "padfix")
    checked = 2 if method in ("dpo", "kto", "grpo") else 1  # policy and reference
    assert said.count("): parity ok") == checked * (not callback.endswith("unchecked"))
    assert said.count("tokens were computed") == 1 or kind == "images"


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_with_generation_runs_and_agrees(kind, tmp_path):
    """Where padded batches met a cache, FlashAttention-2 once stopped such runs."""
    prepare(tmp_path, "sft", kind)
    evaluates = (
        "--split_dataset_ratio", "0.1", "--eval_strategy", "steps", "--eval_steps", str(STEPS),
        "--predict_with_generate", "true", "--max_new_tokens", "8", "--per_device_eval_batch_size", "4",
        "--temperature", "0",
    )  # fmt: skip
    theirs, _ = train(tmp_path, "sft", None, *evaluates, kind=kind, name="theirs")
    ours, _ = train(tmp_path, "sft", "padfix", *evaluates, kind=kind, name="ours")
    assert_equal_steps_of_fewer_tokens(ours, theirs, shares=False)
    figures = [
        {k: v for log in logs for k, v in log.items() if k.startswith(("eval_rouge", "eval_bleu"))}
        for logs in (ours, theirs)
    ]
    assert figures[0] == figures[1]
    assert figures[0]


@pytest.mark.parametrize(
    ("option", "value"), [("sequence_parallel_size", 2), ("packing", True), ("padding_free", True)]
)
def test_what_takes_padding_away_itself_is_refused_by_name(option, value):
    """Its command line refuses each on a CPU already: without FlashAttention, or with one process."""
    from trl_padfix.integrations.ms_swift import PadfixCallback

    template = {"sequence_parallel_size": 1, "packing": False, "padding_free": False} | {option: value}
    callback = PadfixCallback(None, SimpleNamespace(template=SimpleNamespace(**template)))
    with pytest.raises(PaddingRemovalError, match=f"`--{option} {str(value).lower()}`"):
        callback.on_init_end(None, None, None)
