"""The parts of the night hold every test file, each in one part, and the suite of older versions names files."""

from __future__ import annotations

from pathlib import Path

import pytest


noxfile = pytest.importorskip("noxfile", reason="nox is not installed")

ROOT = Path(__file__).parents[1]
PARTS = {number: noxfile.nightly_files(number) for number in noxfile.NIGHTLY}


def test_every_test_file_is_in_one_part_and_those_for_older_versions_exist():
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))
    assert sorted(file for part in PARTS.values() for file in part) == files
    assert all(PARTS.values())
    assert not [file for file in (*noxfile.STACKS, *noxfile.TRAINERS, noxfile.STORIES) if not (ROOT / file).exists()]
