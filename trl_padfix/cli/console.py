"""What the commands share: the console that they print to, checks of their options, and how they write files."""

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
    "LONGEST",
    "JsonOption",
    "console",
    "device_of",
    "figure_table",
    "one_of",
    "outputs",
    "print_as_is",
    "write_json",
    "write_output",
]

console = Console()

LONGEST = 10**9
"""The largest number of tokens that an option takes: beyond it numbers no longer fit their types."""

_figures: TextIO | None = None  # where `--json -` of this command writes; `None` without it


def _leave_it_to_json(ctx: typer.Context, path: Path | None) -> Path | None:
    """With `-`, standard output is the JSON's alone: whatever else the command prints goes to standard error."""
    global _figures
    _figures = sys.stdout if str(path) == "-" else None
    if _figures is not None:
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
    """Print lines that rich neither colours nor wraps."""
    console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)


def figure_table(columns: Sequence[str], rows: Iterable[Sequence[str]], **style: Any) -> Table:
    """A table whose first column names what the others, aligned to the right, are figures of."""
    table = Table(**style)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=bool(style))
    for row in rows:
        table.add_row(*row)
    return table


def one_of(option: str, value: str, known: Iterable[str]) -> None:
    """Refuse a value of an option that is not among the `known`."""
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}.", param_hint=option)


def device_of(device: str) -> str:
    """The device that `--device` names, if it is there; `auto` is the GPU where there is one."""
    import torch

    there = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if device == "auto":
        return there[0]
    if device == "cuda" and device not in there:
        raise typer.BadParameter(f"torch {torch.__version__} finds no GPU here.", param_hint="--device")
    one_of("--device", device, ["cpu", "auto"] if there == ["cpu"] else ["cpu", "cuda", "auto"])
    return device


def outputs(**paths: Path | None) -> None:
    """Refuse files (options by their names) that cannot be written, before the command works for them."""
    from ..files import refuse_output

    given = {name: path for name, path in paths.items() if path is not None and str(path) != "-"}
    for name, path in given.items():
        if reason := refuse_output(path):
            raise typer.BadParameter(reason, param_hint=f"--{name}")
    if len({path.resolve() for path in given.values()}) < len(given):
        raise typer.BadParameter(f"{' and '.join(given)} write the same file.", param_hint=f"--{next(iter(given))}")


def write_output(option: str, path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all, after the figures were printed."""
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


def write_json(path: Path | None, found: Any) -> None:
    """What `--json` asks for: nothing without it. Figures that cannot be written are printed: they are not lost."""
    if path is None:
        return
    text = json.dumps(found, indent=2)
    if _figures is not None:
        return typer.echo(text, file=_figures)
    try:
        write_output("--json", path, lambda beside: beside.write_text(text + "\n"))
    except typer.BadParameter:
        typer.echo(text)
        raise
