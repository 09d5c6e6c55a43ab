"""The `trl-padfix` command: each of its commands is a function in a module of this folder."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from typer import Option

from ..version import __version__
from . import disable_telemetry, doctor, stats, train
from .methods import METHODS
from .user_errors import DEBUG, UserErrorGroup


app = typer.Typer(
    cls=UserErrorGroup,
    no_args_is_help=True,
    help="Drop-in TRL trainers that skip padding and compute shared prompts once.",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # its panels cut the names of options in 80 columns
)
app.command()(doctor.doctor)
app.command()(stats.stats)
for method in METHODS:
    app.command(method, context_settings=train.SETTINGS)(train.training(method))


@app.callback(invoke_without_command=True)
def _first(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    disable_telemetry()
    if debug:
        os.environ[DEBUG] = "1"  # for the processes of a training too
    if version:
        typer.echo(__version__)
        raise typer.Exit
