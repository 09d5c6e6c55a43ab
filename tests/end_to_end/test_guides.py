"""The guides: each script runs as it is printed and prints what the page says; speedups are on one page only."""

import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from trl_padfix import build_tiny, dry_run


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


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["KTO", "MyGRPO"])
def test_another_trainer_in_a_script_trains_packed(kind, tmp_path, monkeypatch, capsys):
    if kind == "KTO":
        shuffled = re.search(r"`train_dataset=(unpair_.*?)`", (DOCS / "guides/reward.md").read_text())[1]
        script = SCRIPTS["reward"][0].replace("Reward", "KTO").replace("dataset=pairs", f"dataset={shuffled}")
        script = f"from trl.data_utils import unpair_preference_dataset\n{script}"
    else:
        script = replaced(
            SCRIPTS["grpo"][0], {"trainer = GRPO": f"{blocks('guides/own_loss.md')[-1]}\ntrainer = MyGRPO"}
        )
    printed = run(f"{script}\nprint(type(trainer).__name__, trainer.padding.stats)", tmp_path, monkeypatch, capsys)
    assert re.search(rf"{kind}Trainer PaddingStats.*shared_forwards=[1-9]\d*, padded_forwards=0\)$", printed.strip())


@pytest.mark.slow
def test_the_code_on_rollouts_trains_packed(tmp_path, monkeypatch):
    """As printed, with a tiny model and two steps on two tasks."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    load, code, grpo = blocks("guides/rollouts.md")
    scope: dict = {}
    exec(load, scope)
    scope["rollouts"] = scope["rollouts"].select(range(8))
    for shown, here in {
        '"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(build_tiny("tiny", scope["rollouts"], tmp_path / "model"))),
        'output_dir="runs/agent",': 'output_dir="runs/agent", max_steps=2, use_cpu=True, bf16=False, report_to=[],',
    }.items():
        assert shown in code
        code = code.replace(shown, here)
    exec(code, scope)
    stats = scope["trainer"].padding.stats
    assert stats.shared_forwards > 0
    assert stats.padded_forwards == 0
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    small = "GRPOConfig(max_steps=1, use_cpu=True, bf16=False, report_to=[],"
    exec(grpo.replace("GRPOConfig(", small).replace("batch_size=32", "batch_size=4"), scope)
    assert scope["trainer"].padding.stats.shared_forwards > 0
    # These rollouts are longer than TRL's default, so that nothing is left to train on.
    with pytest.raises(ValueError, match="num_samples=0"):
        exec(code.replace("max_length=16384,", ""), scope)


def replaced(code: str, by_shown: dict[str, str]) -> str:
    for shown, here in by_shown.items():
        assert shown in code, shown
        code = code.replace(shown, here)
    return code


@pytest.mark.slow
def test_the_loop_of_the_page_on_other_stacks_trains_packed(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    exec(next(block for block in blocks("other_stacks.md") if "DataLoader(" in block), {})
    printed = capsys.readouterr().out
    assert re.search(r"packed_tokens=[1-9]\d*, forwards=4, shared_forwards=4, padded_forwards=0\)$", printed.strip())


@pytest.mark.slow
def test_the_answers_to_images_are_those_of_each_prompt_alone(tmp_path):
    import sft_vlm

    folder = sft_vlm.build_tiny(tmp_path / "model")
    processor = AutoProcessor.from_pretrained(folder)
    prompts = [f"{processor.image_token} {text}" for text in ("Which color?", "Is it blue, or not?")]
    images = [[Image.new("RGB", (64, 64), color)] for color in ("red", "navy")]
    model = AutoModelForImageTextToText.from_pretrained(folder)
    scope = {"model": model, "processor": processor, "prompts": prompts, "images": images}
    exec(blocks("guides/vision.md")[1], scope)
    assert (scope["inputs"]["attention_mask"] == 0).any()
    for prompt, image, answer in zip(scope["prompts"], scope["images"], scope["answers"], strict=True):
        alone = scope["processor"](text=prompt, images=image, return_tensors="pt")
        (expected,) = scope["model"].generate(**alone, max_new_tokens=64)[:, alone["input_ids"].shape[1] :]
        assert answer[: len(expected)].equal(expected)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_comparison_with_trl_prints_equal_losses(tmp_path):
    """As printed, but with all of the log: TRL's run has no metric of this package."""
    page = (DOCS / "from_trl.md").read_text()
    commands, printed = re.search(r"```bash\n(run\(\).*?)```.*?```text\n(.*?)```", page, re.DOTALL).groups()
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shown = re.search(r"grep -o .*", commands)[0]
    commands = replaced(commands, {shown: "cat", "TRL_PADFIX_OFF": "echo ---; TRL_PADFIX_OFF"})
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True)
    ours, theirs = done.stdout.split("---\n")
    for run in (ours, theirs):
        assert re.findall(r"'loss': '[^']*'", run) == printed.split("\n")[:-1]
    assert ours.count("'padfix/pad_fraction'") == 5
    assert "'padfix/" not in theirs


def test_the_yaml_of_a_guide_has_fields_of_its_recipe():
    shown = {}
    for page in GUIDES:
        for recipe, fields in re.findall(r"```yaml\n# (recipes/\S+)\n(.*?)```", page.read_text(), re.DOTALL):
            shown[recipe] = yaml.safe_load(fields)
            assert shown[recipe].items() <= yaml.safe_load((ROOT / recipe).read_text()).items()
            assert f"--config {recipe}" in page.read_text()
    assert len(shown) == 2


SPEED_UP = r"\b\d[\d.]*x"


def test_a_guide_is_short_and_claims_no_speed_up():
    assert re.search(SPEED_UP, (DOCS / "speed.md").read_text())
    for page in GUIDES:
        text = page.read_text()
        assert len(text.split()) <= 550, page.name
        assert not re.search(SPEED_UP, re.sub(r"```.*?```", "", text, flags=re.DOTALL)), page.name


@pytest.mark.slow
def test_the_guide_to_losses_shows_a_failed_check(tmp_path, monkeypatch, capfd, caplog):
    page = (DOCS / "guides/own_loss.md").read_text()
    fails, (printed,) = (
        re.search(r"`(loss = -logps.*?)`", page)[1],
        re.findall(r"The loss on 4 rows .*?, padded [\d.]+", page),
    )
    masks = re.search(r"        (loss = .*seen.sum\(\))", page)[1]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for loss, side in ((fails, "right"), (masks, "right"), (masks, "left")):
        caplog.clear()
        capfd.readouterr()
        scope = {"__name__": "__main__"}
        changes = {masks: loss, "report_to": f'padding_side="{side}", max_steps=1, report_to', "trainer.train()": ""}
        exec(replaced(SCRIPTS["own_loss"][0], changes), scope)
        assert dry_run(scope["trainer"]) is (loss is masks)
        scope["trainer"].train()
        said = caplog.text + "".join(capfd.readouterr())
        assert ("A forward of Qwen2Model runs padded" in said) == (loss is fails)
        assert bool(re.search(re.escape(printed).replace(re.escape("..."), r"\d*"), said)) == (loss is fails)
