"""Progress of a command on stderr: a bar on a terminal, elsewhere a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


__all__ = ["progress"]

EVERY = 30.0
"""Seconds between lines where there is no terminal."""


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function to call before each step, with its name, the number of finished steps and of all steps."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps,"))
        with Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
        return
    begin = last = time.monotonic()

    def line(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if 0 < done < total and now - last >= EVERY:
            last = now
            left = (now - begin) * (total - done) / done
            typer.echo(f"{done} of {total} steps, about {left:.0f} s left; now {what}", err=True)

    yield line
