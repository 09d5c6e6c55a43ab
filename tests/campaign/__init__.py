"""
The campaign: random draws of what can go wrong, each checked against something that does not share our code.

A part draws a case (a literal dictionary) from a seed, and attempts it. An attempt returns `HELD` or `REFUSED` (an
error in words, which is as good), or raises what it broke on.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path


__all__ = ["HELD", "PARTS", "REFUSED", "Outcome", "run_part"]

HELD, REFUSED = "held", "refused"


@dataclass(frozen=True)
class Part:
    """A part of the campaign: what is tried, how often in a whole campaign and in every run of the tests."""

    module: str
    what: str
    full: int
    short: int


PARTS = [
    Part("layouts", "layouts against a brute-force oracle", 2_000, 40),
    Part("calls", "model x configuration x call against the padded computation", 100, 3),
    Part("kills", "SIGKILLs, half of them while saving, resumed to the same trajectory", 3, 0),
]


@dataclass
class Outcome:
    """Results of the draws of a part."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return sum(self.counts.values())


def run_part(
    part: Part, count: int, seed: int, folder: Path, say: Callable[[str], object] = print, limit: float | None = None
) -> Outcome:
    """
    Draw and attempt.

    Args:
        part (`Part`):
            Which.
        count (`int`):
            Number of draws.
        seed (`int`):
            Seed of the first draw; each draw adds one.
        folder (`Path`):
            Each draw has a folder in it.
        say (`Callable`):
            Receives what each draw that breaks says: its seed, its error and its case.
        limit (`float`, *optional*):
            Seconds after which no draw is begun.
    """
    module = import_module(f"campaign.{part.module}")
    outcome, begin = Outcome(), time.perf_counter()
    for number in range(seed, seed + count):
        if limit is not None and time.perf_counter() - begin > limit:
            break
        case = json.loads(json.dumps(module.draw(random.Random(number))))
        place = folder / f"{part.module}-{number}"
        place.mkdir(parents=True)
        try:
            outcome.counts[module.attempt(case, place)] += 1
        except Exception as error:
            outcome.counts["broke"] += 1
            outcome.broken.append(f"Draw {number} of {part.module} broke: {type(error).__name__}: {error}\n{case}")
            say(outcome.broken[-1])
    outcome.seconds = time.perf_counter() - begin
    return outcome
