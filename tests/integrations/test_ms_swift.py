"""`swift sft`, `swift rlhf`, with and without the plug-in; `nox -s plugins` has an environment with ms-swift."""

import sys

import pytest
from kit.foreign_stacks import (
    STEPS,
    assert_equal_steps_of_fewer_tokens,
    logged,
    preferences,
    run,
    save_model,
    write_lines,
)

from trl_padfix.versions import OTHER_STACKS, installed_version


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed_version("ms-swift") is None, reason="ms-swift is not installed (`nox -s plugins`)"),
]

REWARD = """
from swift.rewards import ORM, orms

class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(completion)) for completion in completions]

orms["length"] = Length
"""
METHODS = {
    "sft": ("sft",),
    "dpo": ("rlhf", "--rlhf_type", "dpo"),
    "kto": ("rlhf", "--rlhf_type", "kto"),
    "rm": ("rlhf", "--rlhf_type", "rm"),
    "grpo": (
        "rlhf", "--rlhf_type", "grpo", "--num_generations", "4", "--max_completion_length", "12",
        "--reward_funcs", "length", "--temperature", "1.0", "--beta", "0.04",
    ),
}  # fmt: skip


def rows(method: str) -> list[dict]:
    found = []
    for i, row in enumerate(preferences(100)):
        asked = [{"role": "user", "content": row["prompt"]}]
        answer = [{"role": "assistant", "content": row["chosen"]}]
        more = {"rejected_response": row["rejected"]} if method in ("dpo", "rm") else {}
        more |= {"label": bool(i % 2)} if method == "kto" else {}
        found.append({"messages": asked + (answer if method != "grpo" else []), **more})
    return found


def train(folder, method: str, callback: str | None, *more: str, name: str) -> tuple[list[dict], str]:
    (folder / "padfix.py").write_text("import trl_padfix.integrations.ms_swift\n")
    (folder / "reward.py").write_text(REWARD)
    plugins = ["reward.py"] * (method == "grpo") + ["padfix.py"] * bool(callback)
    command = [
        "swift", *METHODS[method], "--model", "model", "--model_type", "qwen2", "--template", "dummy",
        "--tuner_type", "full", "--torch_dtype", "float32", "--attn_impl", "sdpa", "--dataset", "rows.jsonl",
        "--max_steps", str(STEPS), "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1",
        "--learning_rate", "1e-4", "--lr_scheduler_type", "constant", "--logging_steps", "1",
        "--save_steps", str(STEPS),
        "--gradient_checkpointing", "false", "--report_to", "none", "--output_dir", name,
        *(["--external_plugins", *plugins] if plugins else []),
        *(["--callbacks", callback] if callback else []), *more,
    ]  # fmt: skip
    said = run(*command, folder=folder, MODELSCOPE_CACHE=str(folder / "hub"))
    return logged(folder / name), said


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("method", METHODS)
def test_a_callback_removes_padding(method, folder):
    write_lines(folder / "rows.jsonl", rows(method))
    shares = method in ("dpo", "rm", "grpo")
    theirs, _ = train(folder, method, None, name="theirs")
    ours, said = train(folder, method, "padfix_sharing" if shares else "padfix", name="ours")
    assert_equal_steps_of_fewer_tokens(ours, theirs, shares=shares)
    assert said.count("parity ok") == (2 if method in ("dpo", "kto", "grpo") else 1)  # policy and reference


def test_evaluation_with_generation_runs_and_agrees(folder):
    """Where padded batches met a cache, FlashAttention-2 once stopped such runs."""
    write_lines(folder / "rows.jsonl", rows("sft"))
    evaluates = (
        "--split_dataset_ratio", "0.1", "--eval_strategy", "steps", "--eval_steps", str(STEPS),
        "--predict_with_generate", "true", "--max_new_tokens", "8", "--per_device_eval_batch_size", "4",
        "--temperature", "0",
    )  # fmt: skip
    theirs, _ = train(folder, "sft", None, *evaluates, name="theirs")
    ours, _ = train(folder, "sft", "padfix", *evaluates, name="ours")
    assert_equal_steps_of_fewer_tokens(ours, theirs, shares=False)
    figures = [
        {k: v for log in logs for k, v in log.items() if k.startswith(("eval_rouge", "eval_bleu"))}
        for logs in (ours, theirs)
    ]
    assert figures[0] == figures[1]
    assert figures[0]


def test_an_unknown_callback_stops_before_the_first_step(folder):
    write_lines(folder / "rows.jsonl", rows("sft"))
    with pytest.raises(AssertionError, match="padfix_shared"):
        train(folder, "sft", "padfix_shared", name="out")
    assert not list((folder / "out").rglob("checkpoint-*"))


def test_another_version_is_refused_when_the_plug_in_is_loaded(monkeypatch):
    monkeypatch.setitem(OTHER_STACKS, "ms-swift", "3.1.0")
    monkeypatch.delitem(sys.modules, "trl_padfix.integrations.ms_swift", raising=False)
    with pytest.raises(RuntimeError, match=r"run with ms-swift 3\.1\.0, and 4\.\d+\.\d+ is installed"):
        __import__("trl_padfix.integrations.ms_swift")
