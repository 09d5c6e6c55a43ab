"""
Names of TRL, transformers, accelerate, PEFT and torch that this package leans on, compared with what is installed.

`upstream.md` lists them, with their signatures and versions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from trl_padfix.versions import installed_version


__all__ = ["Upstream", "contract", "fits", "unmet"]

PACKAGES = {"trl", "transformers", "accelerate", "peft", "torch"}


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


@cache
def contract() -> tuple[Upstream, ...]:
    """The names of `upstream.md`, in its order."""
    names = []
    for line in Path(__file__).with_suffix(".md").read_text().splitlines():
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
        if not has_signature or (found.__module__ or "torch").partition(".")[0] not in PACKAGES:
            return True  # a user's patch says nothing of the version
        return {*re.findall(r"\w+", arguments)} <= inspect.signature(found).parameters.keys()
    except (ImportError, AttributeError):
        return False


def unmet(names: Iterable[Upstream]) -> list[str]:
    """A sentence for each of the names that the installed versions should have, and have not."""
    gone = [name for name in names if name.is_expected and not fits(name)]
    return [f"`{name.name}` of `{name.place}` is not there or not what it was ({name.why})." for name in gone]
