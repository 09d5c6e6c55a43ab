"""The `trl-padfix` command: each of its commands is a function in a module of this folder."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.version import __version__
from . import bench, doctor, parity, stats, train
from .launch import METHODS


app = typer.Typer(no_args_is_help=True, help="TRL's trainers without padding.", pretty_exceptions_show_locals=False)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(stats.stats)
app.command()(parity.parity)
for method in METHODS:
    app.command(method, cls=train.TrainingCommand, context_settings=train.SETTINGS)(train.training(method))


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
