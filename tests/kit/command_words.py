"""Commands checked word by word: every option, file and extra is known to what would run them. Nothing is run."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import typer.main
from kit.printed import ROOT
from packaging.requirements import Requirement

from trl_padfix.cli.app import app
from trl_padfix.cli.launch import parse
from trl_padfix.cli.methods import METHODS


try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib


PIP = (
    *("-q", "--quiet", "-U", "--upgrade", "--pre"),
    *("--no-deps", "--no-build-isolation", "--no-cache-dir", "--force-reinstall"),
)


def check(command: str) -> None:
    """Raise unless all words of a command are known to what would run it."""
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    name, *rest = words
    if name == "trl-padfix":
        _ours(rest)
    elif name == "accelerate":
        _launched(rest[1:])
    elif name == "torchrun":
        from torch.distributed.run import get_args_parser

        given = get_args_parser().parse_args(rest)
        _script(["-m"] * given.module + [given.training_script, *given.training_script_args])
    elif name.startswith("python"):
        _script(rest)
    elif name == "pip":
        _installed(rest[1:])
    elif name == "pytest":
        _tests(rest)
    else:
        _sessions(rest)


def _ours(words: list[str]) -> None:
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


def _launched(words: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    given = launch_command_parser().parse_args(words)
    if given.config_file:
        assert given.config_file == "accelerate.yaml" or (ROOT / given.config_file).exists(), given.config_file
    script, arguments = given.training_script, given.training_script_args
    if given.module:
        assert script == "trl_padfix", script
        _ours(arguments)
    elif (method := Path(script).stem) in METHODS:
        assert (ROOT / script).exists(), script
        _ours([method, *arguments])
    else:
        _script([script, *arguments])


def _script(words: list[str]) -> None:
    """A script, or a module with `-m`, and its options: those that it names."""
    if words[0] == "-m":
        spec = find_spec(words[1])
        assert spec is not None, words[1]
        path, rest = Path(str(spec.origin)), words[2:]
    else:
        path, rest = ROOT / words[0], words[1:]
    assert path.exists(), path
    source = path.read_text()
    for option in (word.split("=")[0] for word in rest if word.startswith("--")):
        field = rf"^    {option[2:].replace('-', '_')}: "  # of a dataclass
        known = f'"{option}"' in source or ('f"--{name}"' in source and f'"{option[2:]}":' in source)
        known = known or re.search(field, source, re.MULTILINE)
        assert known or _is_field(source, option[2:]), f"{path.name} has no {option}"


def _is_field(source: str, name: str) -> bool:
    """Whether an option of a training script is a field of the arguments of all trainings."""
    from trl import ModelConfig, ScriptArguments

    from trl_padfix import DPOConfig

    kinds = (DPOConfig, ModelConfig, ScriptArguments)
    return "TrlParser" in source and (name == "config" or any(name in kind.__dataclass_fields__ for kind in kinds))


def _installed(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    while words:
        word = words.pop(0)
        if word == "--group":
            assert words.pop(0) in project["dependency-groups"]
        elif word in ("-e", "-r"):
            target = re.fullmatch(r"([^\[]+)(?:\[([\w,]+)\])?", words.pop(0))
            assert (ROOT / target[1]).exists(), target[1]
            for extra in (target[2] or "").split(","):
                assert not extra or extra in project["project"]["optional-dependencies"], extra
        elif word == "--index-url":
            words.pop(0)
        elif word.startswith("-"):
            assert word in PIP, word
        elif not word.startswith("git+https://"):
            needed = Requirement(word)
            if needed.name in ("trl-padfix", "trl_padfix"):
                assert needed.extras <= project["project"]["optional-dependencies"].keys(), needed.extras


def _tests(words: list[str]) -> None:
    options = (ROOT / "tests/conftest.py").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    marks = {mark.split(":")[0] for mark in project["tool"]["pytest"]["ini_options"]["markers"]}
    while words:
        word = words.pop(0)
        if word == "-m":
            assert {*re.findall(r"\w+", words.pop(0))} - {"and", "or", "not"} <= marks
        elif word in ("-k", "-n", "--dist"):
            words.pop(0)
        elif word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in options, word
        elif not word.startswith("-") and not re.fullmatch(r"[\d.]+", word):
            assert (ROOT / word.split("::")[0]).exists(), word


def _sessions(words: list[str]) -> None:
    source, option = (ROOT / "noxfile.py").read_text(), "-s"
    for word in words[: words.index("--") if "--" in words else None]:
        if word in ("-s", "--tags"):
            option = word
        else:
            name = re.match(r"\w+", word)[0]
            assert (f"def {name}(" if option == "-s" else f'"{name}"') in source, word
