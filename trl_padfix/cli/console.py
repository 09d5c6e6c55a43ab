"""Shared by the commands: the console, checks of options, tables, and atomic writes of files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table
from typer import Option


__all__ = [
    "LONGEST", "JsonOption", "console", "device_of", "figure_table", "one_of", "or_dash", "outputs", "print_as_is",
    "write_json", "write_output",
]  # fmt: skip

console = Console()

LONGEST = 10**9
"""Largest number of tokens that an option takes: sums of larger ones would overflow 64 bits."""

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
        help="Write what was found to this file, as JSON; - prints it, and all else to standard error.",
    ),
]


def print_as_is(*lines: str) -> None:
    """Print lines without colours and wrapping, so that commands in them can be copied."""
    console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def figure_table(columns: Sequence[str], rows: Iterable[Sequence[str]], **style: Any) -> Table:
    """A table with names in the first column and figures, aligned to the right, in the others."""
    table = Table(**style)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=bool(style))
    for row in rows:
        table.add_row(*row)
    return table


def or_dash(value: float | None, form: str = "") -> str:
    """A figure in a table, or `-` where there is none."""
    return "-" if value is None else format(value, form)


def one_of(option: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value of an option that is not among its `choices`."""
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}.", param_hint=option)


def device_of(device: str) -> str:
    """The device of `--device`, refused if the machine lacks it; `auto` is the GPU if there is one."""
    import torch

    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if device == "auto":
        return devices[0]
    if device == "cuda" and device not in devices:
        raise typer.BadParameter(f"torch {torch.__version__} finds no GPU here.", param_hint="--device")
    one_of("--device", device, ["cpu", "auto"] if devices == ["cpu"] else ["cpu", "cuda", "auto"])
    return device


def outputs(**paths: Path | None) -> None:
    """Refuse files that cannot be written, by the names of their options, before the command starts its work."""
    from ..files import output_obstacle

    files = {name: path for name, path in paths.items() if path is not None and str(path) != "-"}
    for name, path in files.items():
        if reason := output_obstacle(path):
            raise typer.BadParameter(reason, param_hint=f"--{name}")
    if len({path.resolve() for path in files.values()}) < len(files):
        raise typer.BadParameter(f"{' and '.join(files)} write the same file.", param_hint=f"--{next(iter(files))}")


def write_output(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write a file completely or not at all; call it after the figures are printed."""
    from ..files import write_whole
    from .user_errors import describe

    try:
        write_whole(path, write)
    except OSError as error:
        raise typer.BadParameter(
            f"{str(path)!r} was not written ({describe(error)}) The figures are printed above, nothing half-written "
            "is left, and a file that was there before is as it was.",
            param_hint=option,
        ) from error


def write_json(path: Path | None, figures: Any) -> None:
    """Write the figures of `--json`, if it is given. If the file cannot be written, print them, so none is lost."""
    if path is None:
        return
    text = json.dumps(figures, indent=2)
    if _json_output is not None:
        return typer.echo(text, file=_json_output)
    try:
        write_output("--json", path, lambda beside: beside.write_text(text + "\n"))
    except typer.BadParameter:
        typer.echo(text)
        raise
