"""
The campaign: random draws of what can go wrong, each checked against something that does not share our code.

A part draws a case (a literal dictionary) from a seed, and attempts it. An attempt returns `HELD` or `REFUSED` (an
error in words, which is as good), or raises what it broke on.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


__all__ = ["HELD", "PARTS", "REFUSED", "Part", "run_part"]

HELD, REFUSED = "held", "refused"


class Part(NamedTuple):
    """A part of the campaign, with its draws in a whole campaign and in every run of the tests."""

    module: str
    full: int
    short: int


PARTS = [Part("layouts", 2_000, 40), Part("calls", 100, 3), Part("kills", 3, 0)]


def run_part(
    part: Part, count: int, seed: int, folder: Path, limit: float = math.inf
) -> tuple[Counter[str], list[str]]:
    """Outcomes of `count` draws, begun within `limit` seconds; and the seed, error and case of each one that broke."""
    module, begin = import_module(f"campaign.{part.module}"), time.perf_counter()
    counts: Counter[str] = Counter()
    broken: list[str] = []
    for number in range(seed, seed + count):
        if time.perf_counter() - begin > limit:
            break
        case = json.loads(json.dumps(module.draw(random.Random(number))))
        place = folder / f"{part.module}-{number}"  # each draw has a folder
        place.mkdir(parents=True)
        try:
            counts[module.attempt(case, place)] += 1
        except Exception as error:
            broken.append(f"Draw {number} of {part.module} broke: {type(error).__name__}: {error}\n{case}")
            print(broken[-1], flush=True)
    return counts, broken
