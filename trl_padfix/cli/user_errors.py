"""
Errors that a user can mend, as messages with exit code 2; all others are bugs of this package, with their traceback.

[`UserErrorGroup`] is the group that all commands belong to, and [`explain_errors`] does the same for a process of a
training. `--debug` (or `TRL_PADFIX_DEBUG=1`) shows the traceback of every error.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from .methods import METHODS


__all__ = ["DEBUG", "MISTAKE", "UserErrorGroup", "WholeSummaries", "describe", "explain_errors", "user_errors_of"]

DEBUG = "TRL_PADFIX_DEBUG"
"""Environment variable that `--debug` sets, so that the processes of a training see it."""

MISTAKE = 2
"""Exit code of a mistake of the user, as of a wrong option."""

_READERS = {"datasets", "fsspec", "huggingface_hub", "jinja2", "pyarrow", "safetensors", "tokenizers", "yaml"}
"""Packages that read what a user names: what they raise is about that."""

_WORDED = {"accelerate", "datasets", "huggingface_hub", "peft", "transformers", "trl", "trl_padfix"}
"""Packages that check what they are given, and raise `ValueError` and the like with a message for their user."""

_OF_THE_SYSTEM = {
    errno.EACCES: "no permission. Change the permission, or name another path",
    errno.ENOENT: "there is no such file or folder. Check the path",
    errno.EISDIR: "it is a folder, and a file is needed. Name a file",
    errno.ENOTDIR: "a part of this path is a file, not a folder. Check the path",
    errno.ENAMETOOLONG: "the name is too long. Check the path",
    errno.EMFILE: "too many files are open. Raise the limit (`ulimit -n`)",
}


class WholeSummaries(TyperGroup):
    """Commands whose summaries are wrapped in `--help`, where click would cut them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command]
            )


class UserErrorGroup(WholeSummaries):
    """The commands, with the errors that they do not explain themselves explained in one place."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if "--debug" in args[1:] and args[0] not in METHODS:  # there TRL has a field of this name
            os.environ[DEBUG] = "1"
            args = [arg for arg in args if arg != "--debug"]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with explain_errors(lambda: f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()):
                return super().invoke(ctx)
        except typer.BadParameter as error:
            if os.environ.get(DEBUG) and error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            raise


@contextmanager
def explain_errors(command: str | Callable[[], str]) -> Iterator[None]:
    """
    End the process with a message and exit code 2 for a mistake of the user. An error that is none goes on, after a
    line that asks to report it. `command` is what the message begins with, or says it.
    """
    from typer.exceptions import TyperException

    try:
        yield
    except (TyperException, typer.Exit, typer.Abort, BrokenPipeError):  # of the last, `| head`, nothing is said
        raise
    except Exception as error:
        message = describe(error)
        command = command if isinstance(command, str) else command()
        if message is None:
            typer.echo(
                f"{command}: the error that follows is not explained, so it is likely to be a mistake of trl-padfix "
                "and not yours. Please report it, with the command and the traceback.",
                err=True,
            )
            raise
        if os.environ.get(DEBUG):
            traceback.print_exception(error)
        typer.echo(f"{command}: {message}\n({DEBUG}=1 or `trl-padfix --debug ...` shows the traceback.)", err=True)
        raise SystemExit(MISTAKE) from error


@contextmanager
def user_errors_of(option: str) -> Iterator[None]:
    """Mistakes in the block, by [`describe`], as usage errors of an option."""
    try:
        yield
    except Exception as error:
        message = None if isinstance(error, typer.BadParameter) else describe(error)
        if message is None:
            raise
        raise typer.BadParameter(message, param_hint=option) from error


def describe(error: BaseException) -> str | None:
    """
    What an error says to the user who made a mistake, or `None` if it looks like a bug of this package.

    It is a mistake of the user if the system refused a path, if a package that reads files raised it, or if it is an
    error with a message that was raised on purpose by code that checks what it is given.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return (
            f"{str(error).split('. ')[0]}. Lower `per_device_train_batch_size`, `max_length` or "
            "`max_tokens_per_batch`, or set `gradient_checkpointing`."
        )
    from ..core.errors import PaddingRemovalError
    from ..files import why_unwritable
    from ..tools.reading import UnreadableError, package_of, reason

    if (why := why_unwritable(error)) is not None:
        return f"{why}."
    if isinstance(error, OSError) and error.errno is not None:
        path = "" if error.filename is None else f"{str(error.filename)!r}: "
        return f"{path}{_OF_THE_SYSTEM.get(error.errno) or error.strerror or error}."
    if isinstance(error, (UnreadableError, PaddingRemovalError)):
        return str(error)
    package, defined_in = package_of(error), type(error).__module__.split(".")[0]
    if isinstance(error, OSError) or defined_in in _READERS:
        return reason(error)
    bugs = (AssertionError, AttributeError, IndexError, KeyError, NameError, TypeError)
    if package in _READERS and not isinstance(error, bugs):
        return reason(error)
    worded = (ImportError, NotImplementedError, ValueError, *((TypeError,) if package == "trl_padfix" else ()))
    if package in _WORDED and isinstance(error, worded) and defined_in == "builtins" and _on_purpose(error):
        return str(error).strip() or None
    return None


def _on_purpose(error: BaseException) -> bool:
    """Whether an error comes from a `raise`, not from an operation that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").startswith("raise")
