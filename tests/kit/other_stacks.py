"""The code of other training stacks, unmodified, out of their wheels."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest


WHEELS = os.environ.get("TRL_PADFIX_WHEELS")
"""A folder with what `pip download --no-deps openrlhf==0.11.2 ms-swift==4.6.0 axolotl==0.19.0` fetches."""


class Placeholder(types.ModuleType):
    """A module that is not installed: importing from it works, and computing with it does not."""

    __path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, and so stands only for what is not installed."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name, path, target=None):
        if not any(f"{known}.".startswith(f"{name}.") or f"{name}.".startswith(f"{known}.") for known in self.names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def module_of(wheel: str, module: str, folder: Path, *absent: str) -> Iterator[types.ModuleType]:
    """
    A module of a wheel, with placeholders for what it imports and the computation does not need; skipped without the
    wheel. A package among the `absent` stands for all in it, a module (`package.module`) for itself.
    """
    found = sorted(Path(WHEELS).glob(f"{wheel}-*.whl")) if WHEELS else []
    if not found:
        pytest.skip(f"no wheel of {wheel} in the folder that TRL_PADFIX_WHEELS names")
    with zipfile.ZipFile(found[-1]) as archive:
        archive.extractall(folder)
    roots = [str(folder), *(str(path) for path in folder.glob("*.data/purelib"))]
    before, finder = set(sys.modules), Placeholders(absent)
    sys.path[:0] = roots
    sys.meta_path.append(finder)
    try:
        yield importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)
        sys.path[:] = [path for path in sys.path if path not in roots]
        for name in set(sys.modules) - before:
            if name.split(".")[0] in {name.split(".")[0] for name in (module, *absent)}:
                del sys.modules[name]
