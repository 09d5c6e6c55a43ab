"""`trl-padfix dpo`, `sft` and the other training methods."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CalledProcessError

import typer

from .launch import make_parser, parse
from .methods import METHODS


__all__ = ["SETTINGS", "training"]

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of click that leave all arguments, `--help` included, to the parser of TRL's script."""


def training(method: str) -> Callable[[typer.Context], None]:
    """Make the command of one of [`METHODS`]."""

    def train(ctx: typer.Context) -> None:
        if set(ctx.args) & {"-h", "--help"}:  # before `accelerate` is imported
            make_parser(method).parse_args(["--help"])
        _, launch = parse(method, ctx.args)
        from accelerate.commands.launch import launch_command
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            launch_command(launch)
        except (CalledProcessError, ChildFailedError, SignalException) as error:  # the processes printed the reason
            raise typer.Exit(1) from error

    train.__doc__ = f"Train with {METHODS[method]}Trainer: TRL's flags, --config FILE.yaml, --dry_run."
    return train
