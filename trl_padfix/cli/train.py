"""`trl-padfix dpo`, `sft` and the other training methods."""

from __future__ import annotations

import signal
from collections.abc import Callable
from subprocess import CalledProcessError

import psutil
import typer

from .launch import INTERRUPTED, make_parser, parse
from .methods import METHODS


__all__ = ["SETTINGS", "pass_on", "training"]

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of click that leave all arguments, `--help` included, to the parser of TRL's script."""


def pass_on(number: int, frame: object) -> None:
    """Send a signal to the process that trains: a supervisor sends it to this process alone, a shell to both."""
    for process in psutil.Process().children():
        process.send_signal(number)


def training(method: str) -> Callable[[typer.Context], None]:
    """Make the command of one of [`METHODS`]."""

    def train(ctx: typer.Context) -> None:
        if set(ctx.args) & {"-h", "--help"}:  # before `accelerate` is imported
            make_parser(method).parse_args(["--help"])
        _, launch = parse(method, ctx.args)
        from accelerate.commands.launch import launch_command
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        # The process that trains prints how to resume, and this one waits for it.
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            launch_command(launch)
        except SignalException as error:
            raise typer.Exit(INTERRUPTED) from error
        except (CalledProcessError, ChildFailedError) as error:  # the processes have printed the reason
            code = error.returncode if isinstance(error, CalledProcessError) else 1
            raise typer.Exit(128 - code if code < 0 else code if code == INTERRUPTED else 1) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    train.__doc__ = f"Train with {METHODS[method]}Trainer: TRL's flags, --config FILE.yaml, --dry_run."
    return train
