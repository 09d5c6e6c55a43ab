"""What the commands share: the console that they print to, and a check of options with fixed choices."""

from __future__ import annotations

from collections.abc import Iterable

import typer
from rich.console import Console


__all__ = ["console", "one_of"]

console = Console()


def one_of(option: str, value: str, known: Iterable[str]) -> None:
    """
    Raises:
        typer.BadParameter: If `value` of `option` is not among the `known`.
    """
    if value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}.", param_hint=option)
