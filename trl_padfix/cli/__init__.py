"""The `trl-padfix` command, a module for each of its commands; they import what they need when they run."""

from __future__ import annotations

import sys
from importlib.util import find_spec


__all__ = ["main", "require_extra"]

NEEDED = ("typer", "rich", "matplotlib")
"""Packages of the extra `cli`."""


def require_extra() -> None:
    """End the process with one line if the extra `cli` is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"trl-padfix: the command line needs {', '.join(missing)}, which the extra `cli` brings: "
            "pip install 'trl-padfix[cli]'"
        )


def main() -> None:
    """Run the command."""
    require_extra()
    from .app import app

    app(prog_name="trl-padfix")
