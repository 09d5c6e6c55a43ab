"""The `trl-padfix` command, a module for each of its commands; they import what they need when they run."""

from __future__ import annotations

import sys
from importlib.util import find_spec


__all__ = ["main"]

NEEDED = ("typer", "rich", "matplotlib")
"""Packages of the extra `cli`."""


def main() -> None:
    """Run the command; without the extra `cli`, say in one line how to get it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"trl-padfix: the command line needs {', '.join(missing)}, which the extra `cli` brings: "
            "pip install 'trl-padfix[cli]'"
        )
    from .app import app

    app(prog_name="trl-padfix")
