"""`upstream.md` names what this package leans on in other packages, and the installed ones have it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import trl
from kit.upstream import Upstream, contract, unmet

import trl_padfix


PACKAGE = Path(__file__).parents[2] / "trl_padfix"
NAMES = contract()
LISTED = {word for name in NAMES for word in re.findall(r"\w+", f"{name.place} {name.name}")}
READ = ("trl", "transformers", "accelerate", "peft")
OF_PYTHON = {"_actions", "_action_groups", "_asdict", "_group_actions", "_optionals", "_replace"} | {"_getframe"}
OF_STACKS = {
    "_build_fsdp_module",
    "_engines",
}  # verl's; `integrations/verl.py` asks for its version, and `nox -s plugins` runs it
TRAINERS = [name for name in trl_padfix.__all__ if name.endswith("Trainer")]


def test_every_name_is_there_and_fits():
    assert unmet(NAMES) == []


def test_every_row_of_the_page_is_read():
    page = PACKAGE.parent / "tests" / "kit" / "upstream.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
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
