"""
The supported versions of transformers and TRL.

Versions are read from package metadata, without an import: `import trl_padfix` stays fast, and an unsupported version
raises an error with a remedy before it fails deep inside.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version


__all__ = [
    "BOUNDS", "INSTEAD", "NEWER", "NEWEST", "OTHER_STACKS", "TESTED", "Stack", "installed_version",
    "installed_versions", "newer_trl", "require", "require_stack",
]  # fmt: skip


class Stack(NamedTuple):
    """Versions that are tested together; with a TRL before 1.10, only `remove_padding` is."""

    transformers: str
    trl: str


TESTED = (
    Stack("4.52.4", "0.17.0"),
    Stack("4.57.6", "1.10.0"),
    Stack("5.10.2", "1.12.0"),
    Stack("5.24.0", "1.16.0"),
)
"""Every pair that `nox` builds and tests, oldest first."""


NEWEST = " and ".join(f"{field} {version}" for field, version in TESTED[-1]._asdict().items())


BOUNDS = {"transformers": SpecifierSet(">=4.52.4,<6"), "trl": SpecifierSet(">=1.10,<2")}
"""`remove_padding` needs the first; the trainers, configurations and collators need both."""


NEWER = dict.fromkeys(("DistillationTrainer", "DistillationConfig", "experimental"), SpecifierSet(">=1.16,<2"))
"""Narrower bounds on TRL, whose distillation trainer was experimental before, with another interface."""


INSTEAD = (
    "`remove_padding(model)` before TRL's own trainer is built, or `PaddingRemovalCallback` in it, works with any TRL."
)
"""Remedy where a trainer of this package does not work."""


OTHER_STACKS = {"axolotl": "0.19.0", "ms-swift": "4.6.0", "verl": "0.9.1", "llamafactory": "0.9.5"}
"""Versions that the plug-ins are tested with. Later patch versions are accepted."""


def installed_version(package: str) -> str | None:
    """The version of an installed package; `None` without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python and of packages for a report; `None` for those that are not installed."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in packages}


def require(package: str, name: str) -> None:
    """
    Check that `package` is installed in a version that the public `name` of this package supports.

    Raises:
        ImportError: If it is not, with the pip line.
    """
    supported = NEWER.get(name, BOUNDS[package]) if package == "trl" else BOUNDS[package]
    installed = installed_version(package)
    if installed is not None and supported.contains(installed, prereleases=True):
        return
    bounds = ",".join(sorted(str(bound) for bound in supported))  # a specifier set has no order of its own
    hint = f" {INSTEAD}" if package == "trl" and installed is not None else ""
    raise ImportError(
        f"`trl_padfix.{name}` needs {package} {bounds}, and {installed or 'none'} is installed.{hint} "
        f"Tested together, newest: {NEWEST}. Run: pip install '{package}{bounds}'"
    )


def newer_trl() -> str:
    """A sentence on a TRL that is newer than the newest tested one (by its minor version); empty for any other."""
    installed, tested = installed_version("trl"), TESTED[-1].trl
    if installed is None or Version(installed).release[:2] <= Version(tested).release[:2]:
        return ""
    return (
        f"TRL {installed} is installed, and TRL {tested} is the newest that this trl_padfix was tested with. "
        f"If something fails that runs with TRL alone: pip install 'trl~={tested}', or a newer trl_padfix."
    )


def require_stack(package: str) -> None:
    """
    Check that another stack is installed in a version that its plug-in supports.

    Raises:
        RuntimeError: If it is not. No `ImportError`, because axolotl prints a plug-in's and trains without it.
    """
    tested, installed = OTHER_STACKS[package], installed_version(package)
    if installed is None or not SpecifierSet(f"~={tested}").contains(installed, prereleases=True):
        raise RuntimeError(
            f"The plug-in of trl_padfix for {package} was tested with {package} {tested}, but "
            f"{installed or 'none'} is installed. Run: pip install '{package}~={tested}', or leave the plug-in out "
            "and add `trl_padfix.PaddingRemovalCallback` to the trainer's callbacks where the stack takes callbacks."
        )
