"""The code on `docs/stories.md`, executed: what is said to raise raises, and what follows it runs."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


if not (_installed("trl").startswith("0.17.") and _installed("transformers").startswith("4.52.")):
    pytest.skip("needs TRL 0.17 and transformers 4.52: `nox -s stories`", allow_module_level=True)

import torch
from flash_stand_in import flash_attention_stand_in
from stack_models import EOS, PAD, alone, build, logps
from test_trl_0_17 import examples, tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer

from trl_padfix import remove_padding


PAGE = Path(__file__).parents[2] / "docs" / "stories.md"

STORIES = {
    title: re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
}


class FromPretrained:
    """An auto class whose `from_pretrained` builds a tiny model."""

    def __init__(self, auto):
        self.auto = auto

    def from_pretrained(self, path, **settings):
        return build("qwen2", settings.pop("attn_implementation"), self.auto, **settings)


@pytest.fixture
def names(tmp_path):
    """What the page takes for granted."""
    with flash_attention_stand_in():
        sequences = torch.tensor([[PAD, 5, 6, 13, 14, PAD], [7, 8, 9, 15, PAD, PAD], [PAD, PAD, 4, 2, 8, 9]])
        args = DPOConfig(
            output_dir=str(tmp_path), max_steps=2, report_to="none", use_cpu=True, disable_tqdm=True,
            save_strategy="no", per_device_train_batch_size=2,
        )  # fmt: skip
        yield {
            "AutoModelForCausalLM": FromPretrained(AutoModelForCausalLM),
            "AutoModelForSequenceClassification": FromPretrained(AutoModelForSequenceClassification),
            "DPOTrainer": DPOTrainer,
            "args": args,
            "attention_mask": (sequences != PAD).long(),
            "eos": EOS,
            "model": build("qwen2", "flash_attention_2"),
            "pairs": examples("dpo"),
            "path": "a model",
            "remove_padding": remove_padding,
            "sequences": sequences,
            "tokenizer": tokenizer(),
            "torch": torch,
        }


def test_the_page_has_its_stories():
    assert [len(blocks) for blocks in STORIES.values()] == [2] * 6


@pytest.mark.parametrize("story", STORIES)
def test_story(story, names):
    before, after = STORIES[story]
    assert "ValueError" in before.splitlines()[-1]
    with pytest.raises(ValueError, match="batched generation with padding_side='right'"):
        exec(before, names)
    exec(after, names)
    model, sequences, mask = names["model"], names["sequences"], names["attention_mask"]
    for logits in (*names.get("overridden", {}).values(), *([names["logits"]] if "logits" in names else [])):
        expected = alone(lambda row, ones: logps(model(row, attention_mask=ones).logits, row, ones), sequences, mask)
        torch.testing.assert_close(logps(logits, sequences, mask), expected, atol=1e-5, rtol=1e-5)
