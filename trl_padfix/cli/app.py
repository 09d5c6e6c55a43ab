"""The `trl-padfix` command: `doctor`, `stats`, and a command for each training method."""

from __future__ import annotations

import signal
from collections.abc import Callable
from subprocess import CalledProcessError
from typing import Annotated

import psutil
import typer
from typer import Option

from ..version import __version__
from . import INTERRUPTED, METHODS, disable_telemetry
from .doctor import doctor
from .launch import parse
from .stats import stats
from .user_errors import UserErrorGroup


app = typer.Typer(
    cls=UserErrorGroup,
    no_args_is_help=True,
    help="Drop-in TRL trainers that skip padding and compute shared prompts once.",
    epilog="The training commands take TRL's flags, --config FILE.yaml and --dry_run.",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": lambda x: x.replace("_", "-")},
    rich_markup_mode=None,  # its panels cut the names of options in 80 columns
)
app.command(short_help=doctor.__doc__)(doctor)  # click would cut a summary that it makes itself
app.command(short_help=stats.__doc__)(stats)


@app.callback(invoke_without_command=True)
def _first(
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    disable_telemetry()
    if version:
        typer.echo(__version__)
        raise typer.Exit


def pass_on(number: int, frame: object) -> None:
    """Send a signal to the process that trains: a supervisor sends it to this process alone, a shell to both."""
    for process in psutil.Process().children():
        process.send_signal(number)


def training(method: str) -> Callable[[typer.Context], None]:
    """Make the command of one of [`METHODS`]."""

    def train(ctx: typer.Context) -> None:
        _, launch = parse(method, ctx.args, is_command=True)
        from accelerate.commands.launch import launch_command
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        # The process that trains prints how to resume, and this one waits for it.
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            launch_command(launch)
        except SignalException as error:
            raise typer.Exit(128 + error.sigval) from error
        except (CalledProcessError, ChildFailedError) as error:  # the processes have printed the reason
            code = error.returncode if isinstance(error, CalledProcessError) else 1
            raise typer.Exit(128 - code if code < 0 else code if code == INTERRUPTED else 1) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return train


for method in METHODS:
    # All arguments, `--help` included, are left to the parser of TRL's script.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    about = f"Train with {METHODS[method]}Trainer."
    app.command(method, short_help=about, context_settings=settings)(training(method))
