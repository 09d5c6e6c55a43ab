"""The recipes, as a user runs them."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from datasets import Dataset
from kit.cells import slow_but
from kit.commands import as_flags, launch_recipe, logs_of, run_script, save_tiny_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from trl_padfix.cli.launch import main, parse


ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SLOW = pytest.mark.slow

COMMANDS = {p.name: shlex.split(re.search(r"^#   (.*)", p.read_text(), re.MULTILINE)[1]) for p in RECIPES}
"""The command in the header of each recipe."""

QUICK = ["sft_qwen2.5_0.5b.yaml", "grpo_qwen2.5_0.5b.yaml"]
ANSWERS = ("chosen", "rejected")
TRAINED = {name: command for name, command in COMMANDS.items() if command[0] == "trl-padfix"}


def test_every_recipe_parses_with_the_method_of_its_command(monkeypatch):
    monkeypatch.chdir(ROOT)
    # The teacher of the distillation is what an earlier command of the page leaves.
    monkeypatch.setattr("trl_padfix.cli.config_file.refuse_missing", lambda *args: None)
    monkeypatch.setattr("trl_padfix.cli.config_file.PACKAGES", {})  # not all of them are installed
    for name in (name for name, words in COMMANDS.items() if "sft_vlm" not in " ".join(words)):
        command, recipe = COMMANDS[name], ["--config", f"recipes/{name}"]
        if name in TRAINED:
            method, args = command[1], [*command[2:], "--use_cpu", "true", "--bf16", "false"]
        else:
            method, args = re.search(r"recipes/(\w+)\.py", " ".join(command))[1], recipe
        (script, training, _, mixture, _), launch = parse(method, args)
        assert name.startswith(method.replace("-", "_"))
        assert training.padding_free
        assert bool(script.dataset_name) != bool(mixture.datasets)
        if name in TRAINED:
            assert args[:2] == recipe
            assert Path(launch.config_file).exists()
            assert launch.training_script_args[0] == method


@pytest.mark.matrix
@SLOW
@pytest.mark.parametrize("method", slow_but(["grpo"], ["sft", "grpo"]))
def test_published_rollouts_are_trained_on(method, tmp_path):
    few = ["--max_steps", "1", "--use_cpu", "true", "--bf16", "false", "--disable_tqdm", "true", "--tasks", "2"]
    batch = [] if method == "grpo" else ["--per_device_train_batch_size", "2"]
    result = run_script("recipes/rollouts.py", method, *few, *batch, "--output_dir", str(tmp_path))
    assert float(re.search(r"'padfix/shared_fraction': '?([\d.]+)", result.stdout)[1]) > 0.1
    assert (tmp_path / "model.safetensors").exists()


@SLOW
def test_the_tiny_recipe_of_images_lowers_the_held_out_loss(tmp_path):
    launch_recipe(
        "sft_vlm", "--config", "recipes/sft_vlm_tiny.yaml", "--output_dir", str(tmp_path), "--max_steps", "4",
        "--eval_steps", "2", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "4",
    )  # fmt: skip
    history = logs_of(tmp_path)
    assert all(0 < entry["padfix/pad_fraction"] < 1 for entry in history if "loss" in entry)
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    model, processor = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    assert model.config.model_type == "llava"
    assert processor.image_token_id == model.config.image_token_id


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A tiny model, and the pairs of the repository as data for each method."""
    directory = tmp_path_factory.mktemp("material")
    pairs = save_tiny_model(directory / "model", intermediate_size=384)  # blocks of 64, for 4 bits
    for method in ("dpo", "reward", "kto", "sft", "grpo", "rloo", "distillation"):
        rows = pairs.to_list()
        if method == "sft":
            rows = [{"messages": row["prompt"] + row["chosen"]} for row in rows]
        elif method == "kto":
            rows = [{"prompt": r["prompt"], "completion": r[k], "label": k == "chosen"} for r in rows for k in ANSWERS]
        elif method in ("grpo", "rloo", "distillation"):
            rows = [{"prompt": row["prompt"]} for row in rows]
        for split in ("train", "test"):
            Dataset.from_list(rows).to_json(directory / method / f"{split}.jsonl")
    return directory


def two_steps(material: Path, method: str, output: Path) -> list[str]:
    """What a recipe is given to run here: another model, less data, no GPU."""
    settings = {
        "model_name_or_path": material / "model",
        "dataset_name": material / method,
        "output_dir": output,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "use_cpu": "true",
        "bf16": "false",
        "disable_tqdm": "true",
    }
    if method in ("grpo", "rloo"):
        settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
        settings |= {"reward_funcs": "think_format_reward"}  # the recipe's needs `math-verify`
    elif method == "distillation":
        settings |= {"teacher_model_name_or_path": material / "model", "max_completion_length": 8}
    else:
        settings |= {"max_length": 256, "eval_strategy": "no"} | ({"eos_token": "<|end|>"} if method == "sft" else {})
    return as_flags(settings)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in TRAINED if "_vl" not in name]
)
def test_a_recipe_trains_a_tiny_model_for_two_steps(name, material, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, method, *args = TRAINED[name]
    args += two_steps(material, method, tmp_path)
    if find_spec("bitsandbytes") is None:
        args += ["--load_in_4bit", "false", "--use_bnb_nested_quant", "false"]
    elif "qlora" in name:  # 4-bit layers on CPU cannot be trained once they were evaluated
        args += ["--parity_check", "false"]
    main(method, [*args, "--save_strategy", "steps", "--save_steps", "2"])
    losses = [log for log in logs_of(tmp_path) if "loss" in log]
    assert len(losses) == 2
    assert all(log["padfix/pad_fraction"] > 0 for log in losses)
    assert any(tmp_path.glob("*model.safetensors"))
