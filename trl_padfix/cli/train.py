"""`trl-padfix dpo`, `sft` and the other training methods."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CalledProcessError

import typer

from .launch import make_parser, parse, warn_of_unused_lora
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
        if warning := warn_of_unused_lora(ctx.args):
            typer.echo(f"trl-padfix {method}: {warning}", err=True)
        from accelerate.commands.launch import launch_command
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            launch_command(launch)
        except (CalledProcessError, ChildFailedError) as error:  # the processes have printed the reason
            raise typer.Exit(1) from error

    train.__doc__ = (
        f"Train with {METHODS[method]}Trainer: TRL's flags, YAML and --accelerate_config, through accelerate launch; "
        "--dry_run checks without a step."
    )
    return train
