"""The commands that pages, messages and tools print: found in texts, and checked word by word without running them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import typer.main
import yaml
from packaging.requirements import Requirement

from trl_padfix.cli.app import app
from trl_padfix.cli.launch import parse
from trl_padfix.cli.methods import METHODS


try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib


ROOT = Path(__file__).parents[2]
WORD = r"(?:trl-padfix|accelerate launch|torchrun|python3?|pip install|pytest|nox)"
SPAN = re.compile(rf"`({WORD} [^`]+)`")  # in a sentence
LINE = re.compile(rf"^(?:[#>$!]*\s+|[$!]\s*)?((?:[A-Z_]+=\S+ )*{WORD} \S.*)$", re.MULTILINE)  # on a line of its own
SAID = re.compile(rf"(?:: |to install +)({WORD} \S[^`\n]*?)(?:[,.] |[,.]?$|`)", re.MULTILINE)  # in a message
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/*/*.md",
    "recipes/*.md",
    "recipes/*/*.md",
    ".github/ISSUE_TEMPLATE/*.yml",
    "noxfile.py",
)
SCRIPTS = ("recipes/**/*.py", "recipes/**/*.yaml", "benchmarks/*.py", "docs/**/*.py")
PIP = ("-q", "-U", "--upgrade", "--pre", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--force-reinstall")
HISTORY = ("CHANGELOG.md", "changelog.md")  # and its copy in the site: they name commands of their time


def of_text(text: str) -> Iterator[str]:
    """The commands of a page or an output: in sentences and on lines of their own, without comments behind them."""
    text = re.sub(r"\s*\\\n\s*", " ", text).replace('\\"', '"')
    for found in [*SPAN.findall(text), *LINE.findall(text), *SAID.findall(text)]:
        for part in found.split(" && "):
            if re.match(rf"(?:[A-Z_]+=\S+ )*{WORD} ", part):
                yield " ".join(re.split(r"[ \t]{2,}| \| ", part)[0].split()).removesuffix(" ...").rstrip(";")


def of_notebook(path: Path) -> Iterator[str]:
    for cell in json.loads(path.read_text())["cells"]:
        yield from of_text("".join(cell["source"]))


def of_strings(path: Path) -> Iterator[str]:
    """The commands in the strings of a module: messages, help and docstrings; what is put in stands in braces."""
    tree = ast.parse(path.read_text())
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else f"{{{ast.unparse(v.value)}}}" for v in node.values)
            text = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            text = node.value
        else:
            continue
        yield from of_text(text)


def everywhere() -> dict[str, list[str]]:
    """Every command that is printed, and where."""
    found: dict[str, set[str]] = {}
    package = ROOT / "trl_padfix"
    texts = [path for pattern in (*PAGES, *SCRIPTS) for path in ROOT.glob(pattern) if path.name not in HISTORY]
    sources = [(path, of_text(path.read_text())) for path in texts]
    sources += [(path, of_notebook(path)) for path in ROOT.glob("notebooks/*.ipynb")]
    sources += [(path, of_strings(path)) for path in package.rglob("*.py")]
    errors = yaml.safe_load((package / "tools/known_errors.yaml").read_text())
    sources.append((package / "tools/known_errors.yaml", of_text("\n".join(str(e) for e in errors))))
    for path, commands in sources:
        for command in commands:
            found.setdefault(command, set()).add(str(path.relative_to(ROOT)))
    return {command: sorted(where) for command, where in sorted(found.items())}


def check(command: str) -> None:
    """Raise unless all words of a command are known to what would run it. Nothing is run."""
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
