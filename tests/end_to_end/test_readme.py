"""What the README and the page on speed show, runs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from kit.cells import slow_but
from typer.testing import CliRunner

from trl_padfix.cli.app import app
from trl_padfix.cli.launch import parse
from trl_padfix.cli.methods import METHODS
from trl_padfix.tools.tiny import SHAPES, build_qwen2, train_tokenizer


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SPEED = (ROOT / "docs/speed.md").read_text()
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


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(README.split()) <= 900
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    assert not re.findall(r"https?://", README)  # no place that does not exist


def test_its_figures_are_those_of_the_page_on_speed():
    for pairs in ("8 pairs", "16 pairs"):
        shown = re.search(rf"^\| DPO, HH-RLHF, {pairs} \|(.*)$", README, re.MULTILINE)[1]
        measured = rf"^\| DPO, {pairs}(?:, on version [\d.]+)? \|.*$"
        held = re.findall(measured, SPEED, re.MULTILINE)[-1]  # the newest
        assert all(figure in held for figure in re.findall(r"[\d.]+x", shown)), shown
    shown = re.search(r"^\| SFT, 32 turns of \[rollouts\]\([^)]*\) \|(.*)$", README, re.MULTILINE)[1]
    held = re.search(r"^\| SFT on a tree:(.*)$", SPEED, re.MULTILINE)[1]
    assert all(figure in held for figure in re.findall(r"[\d.]+x", shown)), shown


COMMANDS = sorted({" ".join(found.split()) for found in re.findall(r"`(trl-padfix \w[^`]*)`", README + SPEED)})
TINY = {  # what stands for what a test has not: the Hub, a GPU, time
    "--model Qwen/Qwen2.5-0.5B-Instruct": "--model {model}",
    "plan Qwen/Qwen2.5-7B-Instruct": "plan {model}",
    "parity --config recipes/dpo_qwen2.5_0.5b.yaml": "parity --model {model} --data recipes/data/preferences --rows 2",
    "--device cuda --dtype bfloat16 --shape 0.5b": "--shape tiny --pairs 2 --steps 1 --warmup 0 --data lengths:20/6",
    "--data test.jsonl.gz": "--data lengths:20/6 --shape tiny",
    "--data equal": "--data equal --shape tiny",
    "--data tree:4x8/600/80": "--data tree:4x4/12/6 --shape tiny",
    "lengths:1024/256": "lengths:20/6",
    "lengths:4096/512": "lengths:20/6",
    "--shape tiny --steps": "--shape tiny --pairs 2 --warmup 0 --steps",
    "--trainer grpo": "--trainer grpo --shape tiny --prompt-length 20 --completion-length 8",
}


BENCHES = [c for c in COMMANDS if c.startswith("trl-padfix bench")]
SLOW = [c for c in BENCHES if "--data equal" not in c and "--trainer" not in c] + [c for c in COMMANDS if "2048" in c]


@pytest.mark.parametrize(
    "command", slow_but(set(COMMANDS) - set(SLOW), [c for c in COMMANDS if c.split()[1] not in METHODS])
)
def test_every_command_runs(command, tiny_model, monkeypatch):
    monkeypatch.chdir(ROOT)
    for shown, here in TINY.items():
        command = command.replace(shown, here.format(model=tiny_model))
    command = re.sub(r"--(steps|pairs) \d+", r"--\1 2", command)
    result = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "120", "HF_HUB_OFFLINE": "1"})
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in METHODS])
def test_every_training_command_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, method, *args = shlex.split(command)
    parse(method, [*args, "--use_cpu", "true", "--bf16", "false"])  # `test_recipes.py` trains with each


def test_ci_runs_what_is_to_be_typed():
    typed = re.findall(r"```bash\n(.*?)\n```", README, flags=re.DOTALL)
    run_by_ci = re.findall(r"readme '(.*?)'", (ROOT / ".ci/run").read_text())
    assert [any(line.startswith(begin) for begin in run_by_ci) for line in typed] == [True] * len(typed)
