"""The recipe for images, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from transformers import AutoModelForImageTextToText, AutoProcessor

import trl_padfix


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_tiny_recipe_names_shapes(tmp_path):
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "recipes/sft_vlm.py"),
        *("--config", "recipes/sft_vlm_tiny.yaml", "--output_dir", str(tmp_path), "--max_steps", "4"),
        *("--eval_steps", "2", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "4"),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]

    for row in ("held-out loss", "padding not computed", "real tokens/s"):
        assert row in result.stdout
    history = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert all(0 < entry["padfix/pad_fraction"] < 1 for entry in history if "loss" in entry)
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    model, processor = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    assert model.config.model_type == "llava"
    assert processor.image_token_id == model.config.image_token_id


def test_it_parses():
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from sft_vlm import RecipeArguments
    finally:
        sys.path.pop(0)
    parser = trl.TrlParser((RecipeArguments, trl_padfix.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    script, training, *_ = parser.parse_args_and_config(
        ["--config", str(ROOT / "recipes/sft_vlm_tiny.yaml")], fail_with_unknown_args=True
    )
    assert script.tiny
    assert training.padding_free
