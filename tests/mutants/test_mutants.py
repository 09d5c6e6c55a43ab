"""The list of faults is up to date: each of them can be put into the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants.mutants import MUTANTS, Mutant


ROOT = Path(__file__).parents[2]


def test_there_are_sixty_different_faults():
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) == 60


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{m.file}: {m.fault}" for m in MUTANTS])
def test_a_fault_still_has_its_place(mutant: Mutant):
    text = (ROOT / "trl_padfix" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, f"occurs {text.count(mutant.old)} times: {mutant.old!r}"
    before, after = ast.parse(text), ast.parse(text.replace(mutant.old, mutant.new))
    assert ast.dump(before) != ast.dump(after)
    assert all((ROOT / "tests" / name.partition("::")[0]).exists() for name in mutant.tests), mutant.tests
