"""The examples of the README run, and its figures are measured. Its commands: `python -m kit.readme_path`."""

import json
import re
from pathlib import Path

import pytest
import torch
from kit import readme_path


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs/index.md").read_text()
SPEED = (ROOT / "docs/speed.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


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
    trainer.restore_padding()
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


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(README.split()) <= 900
    for name in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    assert not re.findall(r"https?://", README)  # no place that does not exist


FIGURES = {  # rows of the README, and the file and variants of their figures
    "DPO, HH-RLHF, 8 pairs": ("dpo-hh-rlhf-8-pairs-auto-cpu", ["padding_free", "prefix_sharing"]),
    "DPO, GSM8K, 8 pairs": ("dpo-gsm8k-8-pairs-cpu", ["padding_free", "prefix_sharing"]),
    "SFT, 32 turns of": ("sft-airline-32-rows-cpu", ["padding_free", "auto", "group_by_prefix"]),
}
FIGURE = r"(?<![\w.])\d+\.\dx"


def measured(name: str, variants: list[str]) -> tuple[list[str], str]:
    """The speed-ups in a file of `docs/bench`, and the version that was measured."""
    found = json.loads((ROOT / f"docs/bench/{name}.json").read_text())
    speed = {variant["name"]: variant["speedup"] for variant in found["variants"]}
    return [f"{speed[variant]:.1f}x" for variant in variants], found["versions"]["trl_padfix"]


@pytest.mark.parametrize("page", [README, START], ids=["README", "index"])
def test_figures_are_those_of_the_files_they_come_from(page):
    rows = {}
    for ours in FIGURES:
        (rows[ours],) = re.findall(rf"^\| {ours}.*$", page, re.MULTILINE)
    version, commit = re.search(r"version (\S+), commit ([0-9a-f]{7})", SPEED).groups()
    assert f"version {version}, commit {commit}" in page
    for ours, row in rows.items():
        figures, measured_version = measured(*FIGURES[ours])
        assert re.findall(FIGURE, row) == figures
        assert measured_version == version
        rows_there = [line for line in SPEED.splitlines() if line.startswith("|")]
        assert any(all(figure in line for figure in figures) for line in rows_there)  # with its command
    assert len(re.findall(FIGURE, page)) == sum(len(variants) for _, variants in FIGURES.values())  # and no others


def test_the_path_has_every_command_in_order_and_leaves_none_out_in_vain():
    path = readme_path.commands()
    first = re.search(r"```bash\n(.*?)\n```", README, re.DOTALL)[1].split(" && ")
    assert path[:2] == first
    assert not any(map(readme_path.why_not, first))
    for pattern in readme_path.LEFT_OUT:
        assert any(re.match(pattern, command) for command in path), pattern
    ci = (ROOT / ".ci/run").read_text()  # the first of them as they are written; the path as a whole is run at night
    assert [line for line in ci.splitlines() if line.startswith("readme 'pip install -e")]
    assert "nox -s readme" in (ROOT / ".github/workflows/nightly.yml").read_text()


def test_the_path_goes_on_with_what_is_printed_and_stops_where_a_command_fails(capsys):
    prints = {
        "trl-padfix stats DATA": "Measure it: python benchmarks/bench.py --data DATA",
        "python benchmarks/bench.py --data DATA": "`trl-padfix stats DATA`, `trl-padfix doctor --model Qwen/Qwen3`",
    }
    assert readme_path.follow(["trl-padfix stats DATA"], prints.__getitem__) == list(prints)
    assert f"doctor --model Qwen/Qwen3\n(left out: {readme_path.HUB})" in capsys.readouterr().out
    assert readme_path.run_in_shell("echo fine") == "fine\n"
    with pytest.raises(SystemExit, match="no_such_command --now: exit code 127"):
        readme_path.run_in_shell("no_such_command --now")
