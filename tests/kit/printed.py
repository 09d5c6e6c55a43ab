"""The commands that pages, messages and tools print, found in texts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).parents[2]
WORD = r"(?:trl-padfix|accelerate launch|torchrun|python3?|pip install|pytest|nox)"
SET = r"(?:[A-Z_]+=\S+ )*"  # variables of the environment
SPAN = re.compile(rf"`[!%]?({SET}{WORD} [^`]+)`")  # in a sentence
LINE = re.compile(  # on a line of its own
    rf"^(?:[#>$]*\s+|\$\s*)?[!%]?({SET}{WORD} \S.*)$|^srun bash -c '({WORD} [^']+)'$", re.MULTILINE
)
SAID = re.compile(rf"(?:: |to install +)({WORD} \S[^`\n]*?)(?:[,.] |[,.]?$|`)", re.MULTILINE)  # in a message
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/*/*.md",
    "recipes/*.md",
    "recipes/*/*.md",
    "skills/*/*.md",
    ".github/ISSUE_TEMPLATE/*.yml",
    "noxfile.py",
)
SCRIPTS = ("recipes/**/*.py", "recipes/**/*.yaml", "benchmarks/*.py", "docs/**/*.py")
HISTORY = ("CHANGELOG.md", "changelog.md")  # and its copy in the site: they name commands of their time


def of_text(text: str) -> Iterator[str]:
    """The commands of a page or an output: in sentences and on lines of their own, without comments behind them."""
    text = re.sub(r"\s*\\\n\s*", " ", text).replace('\\"', '"')
    for found in [*SPAN.findall(text), *map("".join, LINE.findall(text)), *SAID.findall(text)]:
        for part in found.split(" && "):
            if re.match(rf"{SET}{WORD} ", part):
                yield " ".join(re.split(r"[ \t]{2,}| \| ", part)[0].split()).removesuffix(" ...").rstrip(";")


def of_notebook(path: Path) -> Iterator[str]:
    for cell in json.loads(path.read_text())["cells"]:
        yield from of_text("".join(cell["source"]))


def of_strings(path: Path) -> Iterator[str]:
    """The commands in the strings of a module: messages, help and docstrings; what is put in stands in braces."""
    source = path.read_text()
    if not re.search(f"{WORD} ", source):
        return  # as in most modules, and parsing takes long
    tree = ast.parse(source)
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
    for path, commands in sources:
        for command in commands:
            found.setdefault(command, set()).add(str(path.relative_to(ROOT)))
    return {command: sorted(where) for command, where in sorted(found.items())}
