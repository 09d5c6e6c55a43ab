"""What the README shows, runs."""

import re
from pathlib import Path

import pytest
import torch
from datasets import load_dataset

import trl_padfix
from trl_padfix.tiny import SHAPES, build_qwen2, train_tokenizer


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    pairs = load_dataset(str(ROOT / "recipes/data/preferences"), split="train[:16]")
    tokenizer = train_tokenizer((m["content"] for row in pairs for m in row["prompt"]), vocab_size=512)
    tokenizer.save_pretrained(directory)
    build_qwen2(tokenizer, **SHAPES["tiny"] | {"vocab_size": len(tokenizer)}).save_pretrained(directory)
    return directory


def test_the_drop_in_example_trains(tiny_model, tmp_path):
    code = BLOCKS[0]
    for shown, here in {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(tiny_model)),
        'load_dataset("trl-lib/ultrafeedback_binarized", split="train")': (
            f'load_dataset({str(ROOT / "recipes/data/preferences")!r}, split="train[:8]")'
        ),
        'output_dir="runs/dpo",': (
            f"output_dir={str(tmp_path)!r}, max_steps=1, use_cpu=True, bf16=False, report_to=[], logging_steps=1,"
        ),
    }.items():
        assert shown in code
        code = code.replace(shown, here)
    scope: dict = {}
    exec(code, scope)
    history = scope["trainer"].state.log_history
    assert history[0]["padfix/pad_fraction"] > 0
    assert history[0]["padfix/shared_fraction"] > 0


def test_the_one_line_example_packs(tiny_model, capsys):
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    scope = {
        "model": AutoModelForCausalLM.from_pretrained(tiny_model),
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
    }
    exec(BLOCKS[1], scope)
    assert scope["logits"].shape[:2] == (2, 4)
    assert "packed_tokens=5" in capsys.readouterr().out


def test_the_field_table_names_our_fields_and_their_defaults():
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", README, flags=re.MULTILINE))
    fields = trl_padfix.DPOConfig.__dataclass_fields__
    assert rows == {name: str(fields[name].default) for name in rows}
    assert set(rows) == {"padding_free", "prefix_sharing", "padding_side", "parity_check"}


def test_every_file_that_the_readme_names_exists():
    for name in re.findall(r"`((?:trl_padfix|tests|recipes)/[\w/]+\.(?:py|yaml))`", README):
        assert (ROOT / name).exists(), name
