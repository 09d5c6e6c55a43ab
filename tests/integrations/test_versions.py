"""Every plug-in refuses another version of its stack when it is loaded."""

import importlib
import sys

import pytest
from kit.foreign_stacks import of_stack

from trl_padfix.versions import OTHER_STACKS


@pytest.mark.parametrize("package", [pytest.param(name, marks=of_stack(name)) for name in OTHER_STACKS])
def test_another_version_is_refused_when_the_plug_in_is_loaded(package, monkeypatch):
    name = f"trl_padfix.integrations.{package.replace('-', '_')}"
    importlib.import_module(name)
    monkeypatch.setitem(OTHER_STACKS, package, "0.1.0")
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match=rf"run with {package} 0\.1\.0, and \d+\.\d+\.\d+ is installed"):
        importlib.import_module(name)
