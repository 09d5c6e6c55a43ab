"""
Print errors that a user can fix as messages, with exit code 2; all others are bugs of this package, with traceback.

[`UserErrorGroup`] is the group of all commands, and [`explain_errors`] does the same in a process of a training.
`--debug` (or `TRL_PADFIX_DEBUG=1`) shows the traceback of every error.
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


__all__ = ["DEBUG", "MISTAKE", "UserErrorGroup", "WrappedSummaries", "describe", "explain_errors", "user_errors_of"]

DEBUG = "TRL_PADFIX_DEBUG"
"""Environment variable that `--debug` sets, because the processes of a training inherit it."""

# typer before 0.26 has click's exceptions, later versions have their own: the class right below `Exception` in either.
_OF_TYPER = next(c for c in reversed(typer.BadParameter.__mro__) if issubclass(c, Exception) and c is not Exception)

MISTAKE = 2
"""Exit code of a mistake of the user; click uses the same for a wrong option."""

_READERS = {"datasets", "fsspec", "huggingface_hub", "jinja2", "pyarrow", "safetensors", "tokenizers", "yaml"}
"""Packages that read files of the user: their errors are about these files."""

_CHECKERS = {"accelerate", "datasets", "huggingface_hub", "peft", "transformers", "trl", "trl_padfix"}
"""Packages that check their arguments, and raise `ValueError` or the like with a message for the user."""

_SYSTEM_ERRORS = {
    errno.EACCES: "no permission. Change the permission, or name another path",
    errno.ENOENT: "there is no such file or folder. Check the path",
    errno.EISDIR: "it is a folder, and a file is needed. Name a file",
    errno.ENOTDIR: "a part of this path is a file, not a folder. Check the path",
    errno.ENAMETOOLONG: "the name is too long. Check the path",
    errno.EMFILE: "too many files are open. Raise the limit (`ulimit -n`)",
}


class WrappedSummaries(TyperGroup):
    """A group that wraps the summaries of its commands in `--help`, where click would cut them."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command]
            )


class UserErrorGroup(WrappedSummaries):
    """The group of all commands, which explains the errors that a command does not explain itself."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if "--debug" in args[1:] and args[0] not in METHODS:  # trainings have a field `debug` of TRL
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
    End the process with a message and exit code 2 after a mistake of the user in the block.

    Any other error is raised again, after a line that asks the user to report it.

    Args:
        command (`str` or `Callable[[], str]`):
            The beginning of the message, or a function that returns it, called when the error is there.
    """
    try:
        yield
    except (_OF_TYPER, typer.Exit, typer.Abort, BrokenPipeError):  # the last one: `| head` has closed the pipe
        raise
    except Exception as error:
        message = describe(error)
        command = command if isinstance(command, str) else command()
        if message is None:
            typer.echo(f"{command}: {_unknown(error)}", err=True)
            raise
        # Of an error inside of a computation (CUDA, shapes), the place is worth more than a second run of hours.
        if os.environ.get(DEBUG) or type(error).__name__ in ("RuntimeError", "AcceleratorError"):
            traceback.print_exception(error)
        typer.echo(f"{command}: {message}\n({DEBUG}=1 or `trl-padfix --debug ...` shows the traceback.)", err=True)
        raise SystemExit(MISTAKE) from error


@contextmanager
def user_errors_of(option: str) -> Iterator[None]:
    """Turn mistakes of the user in the block (see [`describe`]) into usage errors of an option."""
    try:
        yield
    except Exception as error:
        message = None if isinstance(error, typer.BadParameter) else describe(error)
        if message is None:
            raise
        raise typer.BadParameter(message, param_hint=option) from error


def describe(error: BaseException) -> str | None:
    """
    The message for a user who made a mistake, or `None` if the error looks like a bug of this package.

    It is a mistake of the user in four cases: the system refused a path; a package that reads files raised the error;
    code that checks its arguments raised it on purpose, with a message; or it is one of `known_errors.yaml`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return (
            f"{str(error).split('. ')[0]}. Lower `per_device_train_batch_size`, `max_length` or "
            "`max_tokens_per_batch`, or set `activation_checkpointing`."
        )
    from ..core.errors import PaddingRemovalError
    from ..files import why_unwritable
    from ..tools.reading import UnreadableError, package_of, reason

    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "trl":
        return (
            "this command needs TRL, which is not installed. Run: pip install 'trl>=1.10,<2'. If another stack is in "
            "this environment (verl 0.9 does not start beside a TRL of 1.13 or later), install it in another one."
        )
    if (why := why_unwritable(error)) is not None:
        return f"{why}."
    if isinstance(error, OSError) and error.errno is not None:
        path = "" if error.filename is None else f"{str(error.filename)!r}: "
        return f"{path}{_SYSTEM_ERRORS.get(error.errno) or error.strerror or error}."
    if isinstance(error, (UnreadableError, PaddingRemovalError)):
        return str(error)
    package, defined_in = package_of(error), type(error).__module__.split(".")[0]
    if isinstance(error, OSError) or defined_in in _READERS:
        return _known(error) or reason(error)
    bugs = (AssertionError, AttributeError, IndexError, KeyError, NameError, TypeError)
    if package in _READERS and not isinstance(error, bugs):
        return reason(error)
    worded = (ImportError, NotImplementedError, ValueError, *((TypeError,) if package == "trl_padfix" else ()))
    is_worded = isinstance(error, worded) and defined_in in ("builtins", "trl_padfix")
    if package in _CHECKERS and is_worded and _on_purpose(error):
        known = None if package == __name__.partition(".")[0] else _known(error)  # our messages have a remedy
        return known or str(error).strip() or None
    return _known(error)


def _known(error: BaseException) -> str | None:
    """The message of an error of `known_errors.yaml`, with cause and fix; `None` for an error that is not known."""
    from ..tools.known_errors import explain
    from ..tools.reading import reason

    if isinstance(error, KeyError) and (splits := _splits_without(error)) is not None:
        return f"there is no split {error.args[0]!r}; there is {_listed(splits)}. `dataset_train_split` names another."
    # The error alone: the lines of a traceback hold text of comments and of other branches.
    known = explain("".join(traceback.format_exception_only(error)))
    # A package may report what went wrong beneath it, without its words.
    if not known and error.__cause__ is not None:
        known = explain("".join(traceback.format_exception_only(error.__cause__)))
    if not known:
        return None
    return f"{reason(error).rstrip('.')}. {known[0].cause} What to do: {known[0].fix}"


def _splits_without(error: KeyError) -> list[str] | None:
    """The splits of a `DatasetDict` that was asked for another one; `None` if the error is of another kind."""
    frames = list(traceback.walk_tb(error.__traceback__))
    asked = frames[-1][0].f_locals.get("self") if frames else None
    return sorted(map(str, asked)) if type(asked).__name__ in ("DatasetDict", "IterableDatasetDict") else None


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _unknown(error: BaseException) -> str:
    """What is said before the traceback of an error that is not known here: which package raised it."""
    from ..core.version import WHERE_TO_REPORT
    from ..tools.reading import package_of
    from ..versions import installed_version

    package, ours = package_of(error) or "Python", __name__.partition(".")[0]
    if package == ours:
        return (
            "the error that follows is not known here, and trl-padfix raised it: it is likely to be a mistake of "
            f"trl-padfix and not yours. Please report it, with the command and the traceback. {WHERE_TO_REPORT}"
        )
    version = f" {found}" if (found := installed_version(package)) else ""
    return (
        f"the error that follows is not known here; {package}{version} raised it. If the same command runs with "
        "TRL_PADFIX_OFF=1 (TRL alone), please report it to trl-padfix, with the command and the traceback. "
        f"{WHERE_TO_REPORT}"
    )


def _on_purpose(error: BaseException) -> bool:
    """Whether an error comes from a `raise` statement instead of a failed operation."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").startswith("raise")
