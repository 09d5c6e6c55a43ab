"""
Random draws of everything that is to survive: a few in each run of the tests, all of them with `pytest -m campaign`.

The seed is printed, `--campaign-seed` sets it; no part draws for more than `--campaign-seconds`, and `--campaign-size
10` takes ten times the draws. A draw that breaks prints its seed.
"""

from __future__ import annotations

import random
import re

import campaign
import pytest
from campaign import PARTS, Part, layouts
from kit.cells import MATRIX
from kit.trainer_runs import confusing_layout


SHORT = [pytest.param(part, id=part.module, marks=() if part.short else MATRIX) for part in PARTS]


@pytest.fixture
def seed(request, capsys) -> int:
    given = request.config.getoption("--campaign-seed")
    drawn = random.SystemRandom().randrange(10**6) if given is None else given
    print(f"--campaign-seed {drawn}")
    return drawn


@pytest.mark.parametrize("part", SHORT)
def test_a_short_draw_holds(part: Part, request, tmp_path):
    seed = request.config.getoption("--campaign-seed") or 0
    counts, broken = campaign.run_part(part, max(part.short, 1), seed, tmp_path)
    assert not broken, "\n".join(broken)
    assert counts.total() == max(part.short, 1)


@pytest.mark.campaign
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.module)
def test_the_campaign_holds(part: Part, seed, tmp_path, request, capsys):
    count = max(1, round(part.full * request.config.getoption("--campaign-size")))
    with capsys.disabled():
        print(f"\n{part.module}: {count} draws, --campaign-seed {seed}", flush=True)
        counts, broken = campaign.run_part(part, count, seed, tmp_path, request.config.getoption("--campaign-seconds"))
        print(f"{part.module}: {dict(counts)}", flush=True)
    assert not broken, "\n".join(broken)


def test_a_layout_that_leaks_breaks(tmp_path, monkeypatch):
    """The control: of the draws the wrong ones are named, each with the seed that draws it again."""
    monkeypatch.setattr(layouts, "prefix_sharing_layout", confusing_layout)
    counts, broken = campaign.run_part(PARTS[0], 20, 0, tmp_path)
    assert len(broken) == 20 - counts.total() > 3
    assert all(re.match(r"Draw \d+ of layouts broke: AssertionError", text) for text in broken)
