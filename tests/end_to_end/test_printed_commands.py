"""The commands of the README and the guides: each runs, or is named with the reason why it does not."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands import trl_padfix_command

from trl_padfix.cli import METHODS
from trl_padfix.cli.launch import parse


ROOT = Path(__file__).parents[2]
WORD = r"(?:trl-padfix|accelerate launch|python|pip install|pytest)"
SPAN = re.compile(rf"`({WORD} [^`]+)`")  # in a sentence
LINE = re.compile(rf"^(?:\$\s*)?({WORD} \S.*)$", re.MULTILINE)  # on a line of its own


def of_text(text: str) -> Iterator[str]:
    """The commands of a page, without comments behind them."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    for found in [*SPAN.findall(text), *LINE.findall(text)]:
        for part in found.split(" && "):
            if re.match(f"{WORD} ", part):
                yield re.split(r"[ \t]{2,}", part)[0]


PAGES = [ROOT / "README.md", ROOT / "docs/from_trl.md", *(ROOT / "docs/guides").glob("*.md")]
COMMANDS = sorted({command for page in PAGES for command in of_text(page.read_text())})
TINY = {  # what stands for what a test has not: the Hub, a GPU, time
    r"Qwen/Qwen2\.5-[\w.]+-Instruct": "model",
    r"--train-tokenizer \d+": "--train-tokenizer 300",
}
NOT_RUN = {
    r"pip install ": "brings packages from an index",
    r"python recipes/(sft_vlm|rollouts)\.py": "test_recipes.py trains with these scripts",
    rf"trl-padfix ({'|'.join(METHODS)})\b": "test_recipes.py trains with each; test_launch.py has the flags",
}


def filled(command: str) -> str:
    for shown, here in TINY.items():
        command = re.sub(shown, here, command)
    return command


RUN = [filled(command) for command in COMMANDS if not any(re.match(pattern, command) for pattern in NOT_RUN)]


TRAIN = sorted(command for command in COMMANDS if re.match(rf"trl-padfix (?:{'|'.join(METHODS)})\b", command))


@pytest.mark.parametrize("command", TRAIN)
def test_a_training_command_has_flags_that_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # nothing is downloaded here
    _, method, *args = shlex.split(command)
    (_, training, *_), launch = parse(method, [*args, "--use_cpu", "true", "--bf16", "false"])
    assert training.padding_free
    assert launch.config_file is None or Path(launch.config_file).exists()


def test_accelerate_gets_files_that_exist():
    files = [word for command in COMMANDS for word in shlex.split(command) if word.startswith("recipes/")]
    assert any("accelerate" in name for name in files)
    assert all((ROOT / name).exists() for name in files)


def test_commands_are_found_and_none_is_left_out_in_vain():
    assert {words.split()[0] for words in RUN} == {"trl-padfix"}
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for command in COMMANDS), pattern
    for pattern in TINY:
        assert any(re.search(pattern, command) for command in COMMANDS), pattern


@pytest.mark.parametrize("command", RUN)
def test_a_command_runs(command, tiny_model, tmp_path, monkeypatch):
    """In a folder like a clone, with a tiny model."""
    (tmp_path / "model").symlink_to(tiny_model)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    result = trl_padfix_command(*shlex.split(command)[1:], env={"HF_HUB_OFFLINE": "1"})
    assert result.exit_code == 0, f"{command}\n{result.output}"
