"""The guides: each script runs as it is printed and prints what the page says, and no figure is made up."""

import doctest
import json
import re
from pathlib import Path

import pytest
import transformers
from kit.processes import trained
from transformers import AutoTokenizer


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
SCRIPT = r'```python\n((?:(?!```).)*?="runs/guide_(\w+)".*?)```.*?```text\n(.*?)```'
SCRIPTS = {
    name: (script, printed)
    for page in GUIDES
    for script, name, printed in re.findall(SCRIPT, page.read_text(), re.DOTALL)
}
"""Each script of a guide, by the folder that it writes, with what it prints."""
FAST = ("grpo",)
AS_PRINTED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """What a script prints, run as in a clone of the repository."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(folder)
    exec(compile(script, "guide", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in SCRIPTS])
def test_a_script_prints_what_its_guide_says(name, tmp_path, monkeypatch, capsys):
    if name == "embedding":
        pytest.importorskip("sentence_transformers")
    script, printed = SCRIPTS[name]
    printed = f"...{printed}"  # packages that are loaded first may have said something
    assert re.search(r"'padfix/pad_fraction': '?0\.\d\d", printed)  # the figures are on the page, not only `...`
    got = run(script, tmp_path, monkeypatch, capsys)
    checker = doctest.OutputChecker()
    assert checker.check_output(printed, got, AS_PRINTED), got
    wrong = re.sub(r"('padfix/pad_fraction': '?0\.)\d", r"\g<1>X", printed, count=1)
    assert not checker.check_output(wrong, got, AS_PRINTED)
    for saved in re.findall(r'save_model\("(.*?)"\)', script):  # loads without this package
        kind = json.loads((tmp_path / saved / "config.json").read_text())["architectures"][0]
        assert getattr(transformers, kind).from_pretrained(tmp_path / saved).num_parameters() > 0
        assert "padfix" not in (tmp_path / saved / "config.json").read_text()
        AutoTokenizer.from_pretrained(tmp_path / saved)


def test_a_guide_begins_with_its_rows_and_its_script_saves_a_model():
    for page in GUIDES:
        assert re.search(r"^## (.*)$", page.read_text(), re.MULTILINE)[1] == "What goes in", page.name
    assert [name for name, (script, _) in SCRIPTS.items() if "trainer.save_model(" not in script] == []


UNPAIRED = "unpair_preference_dataset(pairs).shuffle(seed=0)"
SCRIPT_OF = {  # a method, whose script it has, and what stands in place of what
    "RLOO": ("GRPO", {}),
    "Distillation": ("GRPO", {"    num_generations=4,\n": "", "(model, brevity,": "(model, teacher_model=model,"}),
    "Reward": ("DPO", {}),
    "KTO": ("DPO", {"dataset=pairs": f"dataset={UNPAIRED}", "from trl_padfix import build_tiny": (
        "from trl.data_utils import unpair_preference_dataset\nfrom trl_padfix import build_tiny"
    )}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", SCRIPT_OF)
def test_a_method_has_the_script_of_another_with_other_names(method, tmp_path, monkeypatch, capsys):
    printed, others = SCRIPT_OF[method]
    script = SCRIPTS[printed.lower()][0]
    for shown, here in ({printed: method} | others).items():
        assert shown in script
        script = script.replace(shown, here)
    assert "padfix/shared_fraction" in run(script, tmp_path, monkeypatch, capsys)
    (page,) = (page.read_text() for page in GUIDES if f"`{method}Config`" in page.read_text())
    assert f"`{method}Trainer" in page
    assert method != "KTO" or UNPAIRED in page


@pytest.mark.slow
def test_a_script_runs_on_two_processes_as_it_is(tmp_path):
    """As the page on many GPUs says: the log covers the rows of all processes, and a handle those of one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS["dpo"][0].replace('"runs/', f'"{tmp_path}/'))
    said = trained("multi_gpu", tmp_path, script)
    computed = [int(count) for count in re.findall(r"packed_tokens=(\d+)", said)]
    assert len(computed) == 2
    assert "'padfix/shared_fraction': '0.5" in said
    alone = int(re.search(r"packed_tokens=(\d+)", SCRIPTS["dpo"][1])[1])
    assert sum(computed) > alone > max(computed)  # what one process computes


def test_a_guide_is_short_and_its_speed_ups_are_measured_ones():
    measured = set(re.findall(r"\b[\d.]+x", (DOCS / "speed.md").read_text()))
    claimed = set()
    for page in GUIDES:
        text = page.read_text()
        assert len(text.split()) <= 550, page.name
        claimed |= set(re.findall(r"\b\d[\d.]*x", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    assert claimed
    assert claimed <= measured
