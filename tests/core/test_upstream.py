"""
Names of TRL, transformers, accelerate, PEFT and torch that this package leans on, compared with what is installed.

`kit/upstream.md` lists them, with their signatures and versions.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import trl
from packaging.requirements import Requirement

import trl_padfix
from trl_padfix.versions import installed_version


PACKAGE = Path(__file__).parents[2] / "trl_padfix"
PAGE = PACKAGE.parent / "tests" / "kit" / "upstream.md"
READ = ("trl", "transformers", "accelerate", "peft")


class Upstream(NamedTuple):
    """A name of another package."""

    place: str  # `module:object`
    name: str  # an attribute, a signature, or a text of the source in quotation marks
    needs: str  # versions that have it; empty: all that are supported
    why: str

    @property
    def is_expected(self) -> bool:
        """Whether the installed versions should have the name."""
        package = Requirement(self.needs or re.split("[.:]", self.place)[0])
        version = installed_version(package.name)
        return version is not None and package.specifier.contains(version, prereleases=True)


def contract() -> tuple[Upstream, ...]:
    """The names of `upstream.md`, in its order."""
    names = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            places, listed, needs, why = (cell.strip() for cell in line[1:-1].split("|"))
            quoted = re.compile("`(.+?)`").findall
            names += [Upstream(p, name, needs, why) for p in quoted(places) for name in quoted(listed)]
    return tuple(names)


@cache
def fits(name: Upstream) -> bool:
    """Whether the name is there, and as it is expected. Imports its module."""
    module, _, path = name.place.partition(":")
    attribute, has_signature, arguments = name.name.partition("(")
    try:
        owner = reduce(getattr, filter(None, path.split(".")), import_module(module))
        if attribute.startswith('"'):
            source = re.sub(r"(self\.\w+): [^=\n]+ = ", r"\1 = ", inspect.getsource(owner))  # no annotations
            return name.name[1:-1] in source
        found = getattr(owner, attribute)
        if not has_signature or (found.__module__ or "torch").partition(".")[0] not in (*READ, "torch"):
            return True  # a user's patch says nothing of the version
        return {*re.findall(r"\w+", arguments)} <= inspect.signature(found).parameters.keys()
    except (ImportError, AttributeError):
        return False


def unmet(names: Iterable[Upstream]) -> list[str]:
    """A sentence for each of the names that the installed versions should have, and have not."""
    gone = [name for name in names if name.is_expected and not fits(name)]
    return [f"`{name.name}` of `{name.place}` is not there or not what it was ({name.why})." for name in gone]


NAMES = contract()
LISTED = {word for name in NAMES for word in re.findall(r"\w+", f"{name.place} {name.name}")}
OF_PYTHON = {"_actions", "_action_groups", "_asdict", "_group_actions", "_optionals", "_replace"} | {"_getframe"}
OF_STACKS = {
    "_build_fsdp_module",
    "_engines",
}  # verl's; `integrations/verl.py` asks for its version, and `nox -s plugins` runs it
TRAINERS = [name for name in trl_padfix.__all__ if name.endswith("Trainer")]


def test_every_row_of_the_page_is_read_and_every_name_is_there_and_fits():
    assert unmet(NAMES) == []
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert all(len(row.split(" | ")) + row.count(" | | ") in (4, 5) for row in rows)
    assert len(NAMES) == len(set(NAMES)) > len(rows) > 80
    assert all(name.place.partition(".")[0].partition(":")[0] in (*READ, "torch") for name in NAMES)


GONE = [
    ("accelerate.state:GradientState", "_set_sync"),
    ("accelerate.states:", "GradientState"),
    ("transformers:Trainer", "log(prompt)"),
    ("transformers:Trainer", '"self._train_batch_size = 1"'),
]


def test_a_name_that_is_gone_or_another_is_said_with_its_place():
    for place, name in GONE:
        (said,) = unmet([Upstream(place, name, "", "reduces gradients")])
        assert said == f"`{name}` of `{place}` is not there or not what it was (reduces gradients)."
        assert unmet([Upstream(place, name, "transformers>=6", "")]) == []


def own_methods(trainer: type) -> set[str]:
    """The methods of a class of TRL or transformers that our classes define again."""
    ours = [cls for cls in trainer.__mro__ if cls.__module__.startswith("trl_padfix")]
    theirs = [cls for cls in trainer.__mro__ if cls.__module__.startswith(("trl.", "transformers."))]
    defined = {name for cls in ours for name in vars(cls) if not name.startswith("__")}
    return {name for name in defined if any(name in vars(cls) for cls in theirs)}


def test_no_override_is_left_out():
    for trainer in TRAINERS:
        overridden = own_methods(getattr(trl_padfix, trainer))
        assert {"training_step", "log"} < overridden
        listed = {n.name.partition("(")[0] for n in NAMES if n.place in ("transformers:Trainer", f"trl:{trainer}")}
        assert overridden - listed - {"_tag_names", "_name", "_paper", "_template_file"} == set(), trainer
        assert own_methods(getattr(trl, trainer)) == set()


def test_no_import_of_a_module_that_is_not_public_is_left_out():
    imported = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and "." in node.module:
                imported |= {alias.name for alias in node.names if node.module.partition(".")[0] in READ}
    assert {"ALL_ATTENTION_FUNCTIONS", "launch_command"} < imported
    assert imported - LISTED == set()


def test_no_private_name_is_left_out():
    used, ours = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                (ours if own else used).add(node.attr)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                used |= {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
    private = {name for name in used - ours if re.fullmatch(r"_[A-Za-z]\w*[a-z]", name)}
    assert private
    assert private - OF_PYTHON - OF_STACKS - LISTED == set()
