"""`trl-padfix dpo`, `sft` and the other training methods."""

from __future__ import annotations

import signal
from collections.abc import Callable
from subprocess import CalledProcessError

import typer

from .launch import INTERRUPTED, make_parser, parse
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

        # The processes get Ctrl-C too: they print how to resume, and this process waits for them.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            launch_command(launch)
        except SignalException as error:
            raise typer.Exit(INTERRUPTED) from error
        except (CalledProcessError, ChildFailedError) as error:  # the processes have printed the reason
            code = error.returncode if isinstance(error, CalledProcessError) else 1
            raise typer.Exit(code if code == INTERRUPTED else 1) from error
        finally:
            signal.signal(signal.SIGINT, before)

    train.__doc__ = f"Train with {METHODS[method]}Trainer: TRL's flags, --config FILE.yaml, --dry_run."
    return train
