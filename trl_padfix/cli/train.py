"""`trl-padfix dpo`, `sft` and the other training methods."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from .launch import make_parser, parse
from .methods import METHODS
from .user_errors import MISTAKE


if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

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
        from accelerate.commands.launch import launch_command
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        _, launch = parse(method, ctx.args)
        try:
            launch_command(launch)
        except (CalledProcessError, ChildFailedError) as error:  # the processes have printed the reason
            raise typer.Exit(_exit_code(error)) from error

    train.__doc__ = (
        f"Train with {METHODS[method]}Trainer: TRL's flags, YAML and --accelerate_config, through accelerate launch."
    )
    return train


def _exit_code(error: CalledProcessError | ChildFailedError) -> int:
    """[`MISTAKE`] if a process explained a mistake of the user, else 1."""
    failures = getattr(error, "failures", {})
    codes = [failure.exitcode for failure in failures.values()] or [getattr(error, "returncode", 1)]
    return MISTAKE if MISTAKE in codes else 1
