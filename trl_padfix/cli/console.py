"""Checks of the options of `doctor`, and the JSON that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer import Option

from ..files import output_obstacle, write_whole


__all__ = ["JsonOption", "one_of", "outputs", "write_json"]

_json_output: TextIO | None = None  # the stream of `--json -` in this command; `None` without it


def _leave_it_to_json(ctx: typer.Context, path: Path | None) -> Path | None:
    """With `-`, standard output carries only the JSON: all other output of the command goes to standard error."""
    global _json_output
    _json_output = sys.stdout if str(path) == "-" else None
    if _json_output is not None:
        ctx.with_resource(redirect_stdout(sys.stderr))
    return path


JsonOption = Annotated[
    Path | None,
    Option(
        "--json",
        callback=_leave_it_to_json,
        help="Write the result to this file as JSON; - prints it, and everything else goes to standard error.",
    ),
]


def one_of(option: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value of an option that is not among its `choices`."""
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=option)


def outputs(**paths: Path | None) -> None:
    """Refuse files that cannot be written, by the names of their options, before the command starts its work."""
    for name, path in paths.items():
        if path is not None and str(path) != "-" and (reason := output_obstacle(path)):
            raise typer.BadParameter(reason, param_hint=f"--{name}")


def write_json(path: Path | None, figures: Any) -> None:
    """Write the figures of `--json`, if it is given."""
    if path is None:
        return
    text = json.dumps(figures, indent=2)
    if _json_output is not None:
        typer.echo(text, file=_json_output)
    else:
        write_whole(path, lambda beside: beside.write_text(text + "\n"))
