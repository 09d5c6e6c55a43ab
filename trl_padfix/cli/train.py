"""`trl-padfix dpo`, `sft` and the other training methods."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import typer
from typer.core import TyperCommand

from .launch import make_parser, parse, warn_of_unused_lora
from .methods import METHODS


__all__ = ["SETTINGS", "TrainingCommand", "training"]

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of click that leave all arguments, `--help` included, to the parser of TRL's script."""


class TrainingCommand(TyperCommand):
    """A command whose flags are the fields of a configuration."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        actions = make_parser(str(self.name))._actions
        flags = [(flag, action.help or "") for action in actions for flag in action.option_strings]
        return [
            SimpleNamespace(type="plain", value=flag, help=text.split(". ")[0])
            for flag, text in flags
            if flag.startswith(incomplete)
            and "-" not in flag[2:]  # each flag exists with underscores and with hyphens
        ]


def training(method: str) -> Callable[[typer.Context], None]:
    """Make the command of one of [`METHODS`]."""

    def train(ctx: typer.Context) -> None:
        if set(ctx.args) & {"-h", "--help"}:  # before `accelerate` is imported
            make_parser(method).parse_args(["--help"])
        from accelerate.commands.launch import launch_command
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        _, launch = parse(method, ctx.args)
        if warning := warn_of_unused_lora(ctx.args):
            typer.echo(f"trl-padfix {method}: {warning}", err=True)
        try:
            launch_command(launch)
        except (CalledProcessError, ChildFailedError) as error:  # the processes have printed the reason
            raise typer.Exit(1) from error

    train.__doc__ = (
        f"Train with {METHODS[method]}Trainer: TRL's flags, YAML and --accelerate_config, through accelerate launch; "
        "--dry_run checks without a step."
    )
    return train
