"""The examples of the README run, and its figures are measured. Commands: `test_printed_commands.py`, `.ci/run`."""

import json
import re
import shlex
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path

import torch
from kit.commands import trl_padfix_command


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SPEED, FROM_TRL = ((ROOT / f"docs/{page}.md").read_text() for page in ("speed", "from_trl"))
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMAND, PRINTED = re.search(r"```bash\ntrl-padfix (stats .*?)\n```\s+```text\n(.*?)```", FROM_TRL, re.DOTALL).groups()


def test_the_drop_in_example_trains(tiny_model, tmp_path):
    code = BLOCKS[0]
    for shown, here in {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(tiny_model),
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
    trainer = scope["trainer"]
    history, decoder = trainer.state.log_history, trainer.model.model
    assert history[0]["padfix/pad_fraction"] > 0
    assert history[0]["padfix/shared_fraction"] > 0
    assert any("forward" in vars(module) for module in decoder.modules())
    trainer.padding.restore()
    assert not any("forward" in vars(module) for module in decoder.modules())


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


def test_it_is_short_and_names_no_place_outside():
    assert len(README.split()) <= 900
    assert not re.findall(r"https?://", README)  # no place that does not exist


FIGURES = {  # rows of the README, in the order of docs/speed.md, and the file and variant of each figure
    "DPO, 4 pairs": dict.fromkeys(["padding_free", "prefix_sharing"], "dpo-hh-rlhf-4-pairs-smollm2-defaults-cpu"),
    "DPO, 8 pairs": dict.fromkeys(["padding_free", "prefix_sharing"], "dpo-hh-rlhf-8-pairs-smollm2-cpu"),
    "SFT, 8 rows": dict.fromkeys(["padding_free", "auto"], "sft-hh-rlhf-8-rows-smollm2-cpu"),
    "GRPO, 8 completions": dict.fromkeys(["padding_free", "prefix_sharing"], "grpo-8-completions-smollm2-cpu"),
}
FIGURE = r"(?<![\w.])\d+\.\dx"


def measured(variant: str, name: str) -> str:
    """The speedup of a variant in a file of `docs/bench`."""
    found = json.loads((ROOT / f"docs/bench/{name}.json").read_text())
    speed = {variant["name"]: variant["speedup"] for variant in found["variants"]}
    return f"{speed[variant]:.1f}x"


def test_figures_are_those_of_the_files_they_come_from():
    rows = {}
    for ours in FIGURES:
        (rows[ours],) = re.findall(rf"^\| {ours}.*$", README, re.MULTILINE)
    assert re.search(r"measured with commit [0-9a-f]{7}", SPEED)
    assert re.search(r"earlier\s+commit", README)
    for number, (ours, row) in enumerate(rows.items(), 1):
        figures = [measured(*figure) for figure in FIGURES[ours].items()]
        assert re.findall(FIGURE, row) == figures
        there = re.search(rf"^\| {number}\. .*$", SPEED, re.MULTILINE)[0]
        assert re.findall(FIGURE, there) == figures
        assert set(re.findall(r"\d+\.\d\b", row.split("|")[-2])) <= set(re.findall(r"\d+\.\d\b", there))  # peaks
    assert len(re.findall(FIGURE, README)) == sum(map(len, FIGURES.values()))  # and no others


def test_the_count_of_tokens_is_what_its_command_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    got = trl_padfix_command(*shlex.split(COMMAND)).output
    assert OutputChecker().check_output(f"...{PRINTED}", got, ELLIPSIS | NORMALIZE_WHITESPACE), got
