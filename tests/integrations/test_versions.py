"""Every plug-in refuses another version of its stack when it is loaded, whatever that version lacks."""

import importlib
import sys

import pytest

from trl_padfix.versions import OTHER_STACKS


@pytest.mark.parametrize("package", OTHER_STACKS)
def test_another_version_is_refused_before_anything_of_it_is_imported(package, monkeypatch):
    name = f"trl_padfix.integrations.{package.replace('-', '_')}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(OTHER_STACKS, package, "0.1.0")
    monkeypatch.setitem(sys.modules, package.removeprefix("ms-"), None)
    with pytest.raises(RuntimeError, match=rf"run with {package} 0\.1\.0, and (none|\d+\.\d+\.\d+) is installed"):
        importlib.import_module(name)
