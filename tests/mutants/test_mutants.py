"""The list of faults is up to date: each of them can be put into the package."""

from __future__ import annotations

import ast
from pathlib import Path

from mutants.mutants import MUTANTS, Mutant


ROOT = Path(__file__).parents[2]


def test_there_are_sixty_different_faults():
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) == 60


def unfit(mutant: Mutant) -> list[str]:
    """Why a fault cannot be put into the package, or which of its test files are gone."""
    text = (ROOT / "trl_padfix" / mutant.file).read_text(encoding="utf-8")
    found = [f"occurs {text.count(mutant.old)} times: {mutant.old!r}"] if text.count(mutant.old) != 1 else []
    if ast.dump(ast.parse(text)) == ast.dump(ast.parse(text.replace(mutant.old, mutant.new))):
        found.append(f"changes nothing: {mutant.fault}")
    return found + [name for name in mutant.tests if not (ROOT / "tests" / name.partition("::")[0]).exists()]


def test_every_fault_still_has_its_place():
    assert {m.fault: why for m in MUTANTS if (why := unfit(m))} == {}
