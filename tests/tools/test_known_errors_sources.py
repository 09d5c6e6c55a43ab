"""Where the texts of the known errors come from: looked for in the packages that are installed."""

import ast
import mmap
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from trl_padfix.tools.known_errors import KNOWN_ERRORS


FILE = re.compile(r"(?P<package>\w+)(?: (?P<version>\d+\.\d+))?, (?P<path>\S+\.(?:py|so))")
ISSUE = re.compile(r"(?:[\w' ]+: )?https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+(?: \([\w. ]+\))?")
IN_WORDS = {
    "a `TypeError` of Python",
    "an `AttributeError` of torch",
    "the operating system (`ENOSPC`)",
    "the package `kernels`, when it loads a kernel of the Hub",
}
"""What cannot be looked up: the kind of source."""

PARTS = [(error, part) for error in KNOWN_ERRORS for part in error.source.split("; ")]
FILES = [(error, FILE.fullmatch(part)) for error, part in PARTS if FILE.fullmatch(part)]


def literals(pattern: str) -> set[str]:
    """Parts of a regular expression that stand in the text as they are: any four words in a row, or a long word."""
    found = set()
    for literal in re.findall(r"(?:\\[^\w\s]|[\w ',/:=<>-])+", re.sub(r"\\[dwWbs]|.[?*]", "|", pattern)):
        words = re.sub(r"\\(.)", r"\1", literal).split()
        found |= {" ".join(words[i : i + 4]) for i in range(max(1, len(words) - 3))}
    return {literal for literal in found if len(literal) >= 10}


@cache
def strings_of(path: Path) -> str:
    """A file of Python, and its strings as they are printed: written in several parts, with values left out."""
    text = path.read_text()
    joined = [
        "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    return "\n".join([text, *joined]).lower()


def is_in(path: Path, literal: str) -> bool:
    if path.suffix == ".py":
        return literal.lower() in strings_of(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(literal.encode()) >= 0


@pytest.mark.parametrize(("error", "source"), FILES, ids=[f"{error.name}-{source['path']}" for error, source in FILES])
def test_the_text_is_in_the_file_that_is_named(error, source):
    try:
        installed = version(source["package"])
    except PackageNotFoundError:
        pytest.skip(f"{source['package']} is not installed")
    if source["version"] and not installed.startswith(f"{source['version']}."):
        pytest.skip(f"read in {source['package']} {source['version']}, and {installed} is installed")
    path = Path(find_spec(source["package"]).submodule_search_locations[0], source["path"])
    assert any(is_in(path, literal) for literal in literals(error.pattern)), literals(error.pattern)


def test_every_source_is_a_file_an_issue_or_says_what_it_is():
    kinds = {part for _, part in PARTS if not FILE.fullmatch(part) and not ISSUE.fullmatch(part)}
    assert kinds == IN_WORDS
    assert FILES


def test_a_file_without_the_text_does_not_pass():
    path = Path(find_spec("trl_padfix").submodule_search_locations[0], "core/layout/flat_maps.py")
    assert is_in(path, "to_device_async")
    for error in KNOWN_ERRORS:
        assert not any(is_in(path, literal) for literal in literals(error.pattern)), error.name
