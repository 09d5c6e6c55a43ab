"""Commands that pages, messages and tools print: each runs, or each of its words is known to what would run it."""

import os
import re
import shlex
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import bench
import pytest
import typer
from datasets import load_dataset
from kit.cells import slow_but
from kit.commands import build_pairs, trl_padfix_command
from kit.printed import ROOT, everywhere, of_text
from packaging.requirements import Requirement

from trl_padfix.cli.app import app
from trl_padfix.cli.launch import parse
from trl_padfix.cli.methods import METHODS


try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib


FOUND = everywhere()
TEMPLATES = [command for command in FOUND if "{" in command]
"""Commands of messages in which something is put."""
COMMANDS = [command for command in FOUND if "{" not in command]

STAND_FOR = {  # what a reader puts in
    r"\bDATA(?=.* --expand-turns)": "recipes/data/airline/rollouts.jsonl.gz",
    r"\bDATA\b": "recipes/data/preferences",
    r"(--model|--tokenizer|--model_name_or_path) ID": r"\1 model",
    r"\b(FILE|run\.yaml)\b(?! --model)": "figures",
    r"--config (FILE|figures)": "--config recipes/dpo_tiny.yaml",
    r"nproc-per-node N": "nproc-per-node 2",
    r"<a CPU index>": "INDEX",
    r"\btrain\.py": "recipes/dpo.py",  # the script of the DPO guide
    r"\$\(\(.+?\)\)|\$[A-Z_]+": "2",  # SLURM's
    r"(--resume_from_checkpoint) latest": r"\1 false",  # nothing was trained here
}
TINY = {  # what stands for what a test has not: the Hub, a GPU, time
    r"Qwen/Qwen2\.5-[\w.]+-Instruct": "model",
    r"--device cuda --dtype \w+ --shape 0\.5b": "--shape tiny --pairs 2 --steps 1 --warmup 0 --data lengths:20/6",
    r"[\w-]*test\.jsonl\.gz": "pairs.jsonl",
    r"lengths:\d+/\d+": "lengths:20/6",
    r"tree:\d+x\d+/\d+/\d+": "tree:4x4/12/6",
    r"(?<=bench\.py)(?!.*--device)": " --device cpu",
    r"--shape hybrid": "--shape hybrid-tiny",
    r"(?<=bench\.py)(?!.*--shape)": " --shape tiny",
    r"(?<=bench\.py)(?!.*--warmup)": " --warmup 1",
    r"(?<=bench\.py)(?!.*--pairs)": " --pairs 2",
    r"(?<=bench\.py)(?!.*--steps)": " --steps 2",
    r"--max-length \d{5}": "--max-length 2048",
    r"--(steps|pairs|batch-size) \d+": r"--\1 2",
    r"--train-tokenizer \d+": "--train-tokenizer 300",
}
NOT_RUN = {  # and only checked word by word
    r"pip install ": "brings packages from an index",
    r"(pytest|nox) ": "the tests, which CI runs",
    r"(python recipes/\w+\.py|trl-padfix (dpo|sft|distillation)) .*_tiny\.yaml": "test_recipes.py",
    r"python recipes/rollouts\.py \w+ --use_cpu": "trained in test_recipes.py",
    r"accelerate launch .*train\.py": "test_guides.py",
    r"(accelerate launch|python recipes/|trl-padfix) .*(Qwen|qwen|llama|hh_rlhf|rollouts\.jsonl )": "uses the Hub",
    rf"trl-padfix ({'|'.join(METHODS)})\b": "test_recipes.py trains with each; test_launch.py has the flags",
    r"python benchmarks/gpu|torchrun|\w+=\S+ (python|torchrun)": "measures for minutes",
    r"python (docs/\w+\.py|recipes/data/|tests/)": "writes files of the repository; `--check` is run by .ci/run",
    r"python -m trl_padfix": "as `trl-padfix`; test_llamafactory.py runs the plug-in where its stack is",
}


def filled(command: str, *tables: dict[str, str]) -> str:
    for table in tables:
        for shown, here in table.items():
            command = re.sub(shown, here, command)
    return command


def is_run(command: str) -> bool:
    """Whether it is more than the name of a command, and none of those that are not run."""
    words = command.split()
    if words[:2] == ["python", "benchmarks/bench.py"]:
        return len(words) > 2
    named = words[0] == "trl-padfix" and (len(words) < 3 or (len(words) == 3 and words[2].startswith("-")))
    return not named and not any(re.match(pattern, command) for pattern in NOT_RUN)


RUN = {command: tiny for command in COMMANDS if is_run(tiny := filled(command, STAND_FOR, TINY))}
FAST = ("doctor", "python benchmarks/bench.py --pairs 2 --warmup 1 --shape tiny")


@pytest.fixture(scope="module")
def here(tiny_model, tmp_path_factory):
    """A folder like a clone: with the recipes, a tiny model, and pairs in the format of HH-RLHF."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    chats = load_dataset(str(ROOT / "recipes/data/preferences"), split="train[:80]")
    (folder / "model").symlink_to(tiny_model)
    chats.to_json(folder / "chats.jsonl")
    build_pairs(64).to_json(folder / "pairs.jsonl")
    (folder / "accelerate.yaml").write_text((ROOT / "recipes/accelerate/cpu.yaml").read_text())
    return folder


def run(command: str, here, monkeypatch) -> str:
    monkeypatch.chdir(here)
    if command.startswith("python benchmarks/bench.py"):
        with redirect_stdout(StringIO()) as printed:
            bench.main(shlex.split(command)[2:])
        assert "equal in all variants" in printed.getvalue()
        return printed.getvalue()
    result = trl_padfix_command(*shlex.split(command)[1:], env={"HF_HUB_OFFLINE": "1"})
    assert result.exit_code == 0, f"{command}\n{result.output}"
    return result.output


WRITTEN = [
    ("Run `trl-padfix doctor --json x` first.", "trl-padfix doctor --json x"),
    ("Counted by (`PYTHONPATH=tests python a.py`).", "PYTHONPATH=tests python a.py"),
    ("On Kaggle `!accelerate launch a.py`", "accelerate launch a.py"),
    ("if None:\n    %pip install --quiet x  # on Colab", "pip install --quiet x"),
    ("$ HF_HUB_OFFLINE=1 trl-padfix dpo --config a", "HF_HUB_OFFLINE=1 trl-padfix dpo --config a"),
    ("#   trl-padfix dpo --config a", "trl-padfix dpo --config a"),
    ("Measure it: python bench.py --data a.b", "python bench.py --data a.b"),
    ("srun bash -c 'accelerate launch --num_machines $N \\\n  a.py'", "accelerate launch --num_machines $N a.py"),
]


def test_a_command_is_found_however_it_is_written():
    for text, command in WRITTEN:
        assert command in of_text(text)


def test_there_are_commands_and_none_is_left_out_in_vain():
    assert RUN
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for command in COMMANDS), pattern
    for pattern in TINY:
        assert any(re.search(pattern, filled(command, STAND_FOR)) for command in RUN), pattern


# -- every word of a command


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIP = {"-q", "--quiet", "-U", "--upgrade", "--pre", "--no-deps", "--no-build-isolation", "--no-cache-dir"}
PIP |= {"--force-reinstall"}


def check(command: str) -> None:
    """Raise unless all words of a command are known to what would run it. Nothing is run."""
    name, *words = shlex.split(re.sub(r"^([A-Z_]+=\S* )*", "", command))
    if name == "trl-padfix":
        check_ours(words)
    elif name in ("accelerate", "torchrun"):
        check_launched(name, words)
    elif name.startswith("python"):
        check_script(words)
    else:
        {"pip": check_pip, "pytest": check_pytest, "nox": check_nox}[name](words)


def check_ours(words: list[str]) -> None:
    """A command, or the name of a command with at most an option."""
    words = [word for word in words if word != "--debug"]
    if words and words[0] in METHODS:
        if len(words) > 2:
            parse(words[0], [*words[1:], "--use_cpu", "true", "--bf16", "false"])
        return
    command = typer.main.get_command(app)
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    if words[1:] or (words and not words[0].startswith("-")):
        command.make_context("trl-padfix", words)
    elif words:
        assert any(words[0] in option.opts for option in command.params), words[0]


def check_launched(name: str, words: list[str]) -> None:
    if name == "torchrun":
        from torch.distributed.run import get_args_parser as make_parser
    else:
        from accelerate.commands.launch import launch_command_parser as make_parser

        words = words[1:]
    given = make_parser().parse_args(words)
    config = getattr(given, "config_file", None) or "accelerate.yaml"
    assert config == "accelerate.yaml" or (ROOT / config).exists(), config
    check_script(["-m"] * bool(given.module) + [given.training_script, *given.training_script_args])


def check_script(words: list[str]) -> None:
    """A script, or a module with `-m`, and its options: those that its source names."""
    if words[:2] == ["-m", "trl_padfix"]:
        return check_ours(words[2:])
    path, rest = ROOT / words[0], words[1:]
    if words[0] == "-m":
        path, rest = Path(str(find_spec(words[1]).origin)), words[2:]
    assert path.exists(), path
    if (method := path.stem.replace("_", "-")) in METHODS:
        return check_ours([method, *rest])
    source = path.read_text()
    for option in (word.split("=")[0][2:] for word in rest if word.startswith("--")):
        field = rf"^    {option.replace('-', '_')}: "  # of a dataclass
        known = f'"--{option}"' in source or ('f"--{name}"' in source and f'"{option}":' in source)
        known = known or re.search(field, source, re.MULTILINE) or is_field(source, option)
        assert known, f"{path.name} has no --{option}"


def is_field(source: str, name: str) -> bool:
    """Whether an option of a training script is a field of the arguments of all trainings."""
    from trl import ModelConfig, ScriptArguments

    from trl_padfix import DPOConfig

    kinds = (DPOConfig, ModelConfig, ScriptArguments)
    return "TrlParser" in source and (name == "config" or any(name in kind.__dataclass_fields__ for kind in kinds))


def check_pip(words: list[str]) -> None:
    extras, words = PROJECT["project"]["optional-dependencies"].keys(), iter(words[1:])
    for word in words:
        if word == "--group":
            assert next(words) in PROJECT["dependency-groups"]
        elif word in ("-e", "-r", "-c"):
            target = re.fullmatch(r"([^\[]+)(?:\[([\w,]+)\])?", next(words))
            assert (ROOT / target[1]).exists(), target[1]
            assert {*(target[2] or "").split(",")} - {""} <= extras, target[2]
        elif word == "--index-url":
            next(words)
        elif word.startswith("-"):
            assert word in PIP, word
        elif word != "." and not word.startswith("git+https://"):
            needed = Requirement(word)
            assert needed.name not in ("trl-padfix", "trl_padfix") or needed.extras <= extras, needed.extras


def check_pytest(words: list[str]) -> None:
    options, words = (ROOT / "tests/conftest.py").read_text(), iter(words)
    marks = {mark.split(":")[0] for mark in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    for word in words:
        if word == "-m":
            assert {*re.findall(r"\w+", next(words))} - {"and", "or", "not"} <= marks
        elif word in ("-k", "-n", "--dist"):
            next(words)
        elif word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in options, word
        elif not word.startswith("-") and not re.fullmatch(r"[\d.]+", word):
            assert (ROOT / word.split("::")[0]).exists(), word


def check_nox(words: list[str]) -> None:
    source, option = (ROOT / "noxfile.py").read_text(), "-s"
    for word in words[: words.index("--") if "--" in words else None]:
        if word in ("-s", "--tags"):
            option = word
        else:
            name = re.match(r"\w+", word)[0]
            assert (f"def {name}(" if option == "-s" else f'"{name}"') in source, word


UNKNOWN = (AssertionError, ValueError, KeyError, typer.BadParameter.__base__, SystemExit)
WRONG = [
    "trl-padfix stats --jsonn",
    "trl-padfix statss --data equal",
    "trl-padfix dpo --learning_rat 1 --nonsense 2",
    "accelerate launch --cpuu recipes/dpo.py",
    "accelerate launch recipes/dpoo.py --max_steps 1",
    "python benchmarks/bench.py --stepps 5",
    "pip install -e '.[clii]'",
    "pytest -m slowly",
    "nox -s storys",
]


def test_every_word_of_a_command_is_known_and_another_is_found(here, monkeypatch):
    monkeypatch.chdir(here)
    monkeypatch.setattr("trl_padfix.files.is_missing_path", lambda path: False)  # an earlier command leaves it
    unknown = {}
    for command in (*COMMANDS, *WRONG):
        try:
            check(filled(command, STAND_FOR))
        except UNKNOWN as error:
            unknown[command] = repr(error)
    assert {command: error for command, error in unknown.items() if command not in WRONG} == {}
    assert unknown.keys() == {*WRONG}


@pytest.mark.parametrize(
    "command",
    slow_but(
        [c for c in sorted(set(RUN.values())) if c.removeprefix("trl-padfix ").startswith(FAST)],
        sorted(set(RUN.values())),
    ),
)
def test_a_command_runs(command, here, monkeypatch):
    run(command, here, monkeypatch)


RUN_HERE = {"launch.py", "train.py", "config_file.py"}


def test_messages_with_something_put_in_are_pip_lines_or_come_from_a_tool_that_is_run():
    for template in TEMPLATES:
        if template.startswith("pip install"):
            check(re.sub(r"\{[^}]*\}", "1.0", template))
        else:
            assert {os.path.basename(where) for where in FOUND[template]} <= RUN_HERE, template
