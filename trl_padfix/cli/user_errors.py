"""
Print errors that were raised on purpose as their own text, without a traceback, and exit with 1.

[`UserErrorGroup`] is the group of all commands, and [`explain_errors`] does the same in a process of a training.
`TRL_PADFIX_DEBUG=1` shows the traceback of every error.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup


__all__ = ["DEBUG", "UserErrorGroup", "explain_errors"]

DEBUG = "TRL_PADFIX_DEBUG"
"""Environment variable: the processes of a training inherit it."""

CHECKERS = ("accelerate", "datasets", "enum.py", "huggingface_hub", "peft", "transformers", "trl", "trl_padfix")
"""Packages (and a module) that check what a user gives them, and raise errors with a message."""


class UserErrorGroup(TyperGroup):
    """The group of all commands, which explains the errors that a command does not explain itself."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0].lower()  # also `trl-padfix DPO`
        table = (Path(__file__).parents[1] / "experimental/tasks.py").read_text("utf-8")  # its import takes seconds
        if found := re.search(rf'^    "{re.escape(name)}": Experiment\(\s*"(\w+)"', table, re.MULTILINE):
            ctx.fail(
                f"No command {name!r}. In Python: `from trl_padfix.experimental.{name} import {found[1]}Trainer`."
            )
        return super().resolve_command(ctx, [name, *args[1:]])

    def invoke(self, ctx: Any) -> Any:
        with explain_errors(lambda: f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()):
            return super().invoke(ctx)


@contextmanager
def explain_errors(command: str | Callable[[], str]) -> Iterator[None]:
    """
    End the process with the text of an error that was raised on purpose in the block, and exit code 1.

    Any other error is raised again.

    Args:
        command (`str` or `Callable[[], str]`):
            The beginning of the message, or a function that returns it, called on an error.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):  # subclasses of `RuntimeError`; click is silent on `| head`
        raise
    except Exception as error:
        if os.environ.get(DEBUG) or (message := _message(error)) is None:
            raise
        typer.echo(f"{command if isinstance(command, str) else command()}: {message}", err=True)
        typer.echo(f"({DEBUG}=1 shows the traceback.)", err=True)
        raise SystemExit(1) from error


def _message(error: Exception) -> str | None:
    """The text of an error from a `raise` statement of a package that checks what it is given; `None` for others."""
    if type(error).__module__ == "datasets.exceptions" and error.__cause__:  # the cause has the reason
        return f"{error} ({error.__cause__})"
    if isinstance(error, StopIteration):  # of `datasets`
        return "a data file has no row."
    if type(error).__name__ == "SafetensorError":  # its text does not name the file
        if "deserializ" not in str(error):
            return f"`output_dir` cannot be written: {error}."
        return f"a .safetensors file of the model or adapter is cut off or damaged: copy it again ({error})."
    frame = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = (frame.line or "").startswith("raise") and any(name in CHECKERS for name in Path(frame.filename).parts)
    checked = isinstance(error, (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)) and is_raised
    is_unreadable = isinstance(error, OSError | ModuleNotFoundError | SyntaxError)
    return str(error) if checked or is_unreadable or type(error).__module__ == "pyarrow.lib" else None
