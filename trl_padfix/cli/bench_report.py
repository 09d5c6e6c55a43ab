"""`trl-padfix bench --report gpu` and `trl-padfix bench --table FILE`."""

from __future__ import annotations

from pathlib import Path

import typer

from .console import console, one_of, outputs
from .mistakes import mistakes_of


__all__ = ["measure_report", "print_table"]


def measure_report(kind: str, device: str, data: str | None, budget: float, path: Path, backend: str) -> None:
    """
    Check and measure a GPU, and print its table.

    Raises:
        typer.BadParameter: If there is no GPU, or `path` cannot be written.
        typer.Exit: With 1 if a computation is wrong, or a cell failed.
    """
    import torch

    from ..tools.bench.gpu_plan import plan_of
    from ..tools.bench.gpu_report import measure_gpu
    from ..tools.bench.gpu_table import gpu_table
    from ..tools.bench.settings import WrongNumbersError

    one_of("--report", kind, ["gpu"])
    one_of("--device", device, ["cuda", "cpu"])
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(
            "There is no CUDA GPU here, or this torch was built without CUDA. Run it where one is, or see the plan "
            "run at toy size with `--device cpu`; that says nothing about a GPU.",
            param_hint="--report",
        )
    if str(path) == "-":
        raise typer.BadParameter("A report is written as it grows: give it a file.", param_hint="--json")
    outputs(json=path)
    plan = plan_of(toy=device == "cpu", backend=backend)
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    try:
        with mistakes_of("--data"):
            found = measure_gpu(path, plan, device=device, data=data, budget=60 * budget, backend=backend, say=say)
    except WrongNumbersError as error:
        say(f"STOPPED. {error}")
        raise typer.Exit(1) from error
    if device == "cuda":
        typer.echo(gpu_table(found))
    say(f"Written to {path}. This was a CPU." if device == "cpu" else f"Written to {path}.")
    if any(cell["status"].startswith(("wrong", "failed")) for cell in found["cells"]):
        raise typer.Exit(1)


def print_table(path: Path) -> None:
    """
    Print the table of a report in Markdown.

    Raises:
        typer.BadParameter: If the file is no report on a GPU.
    """
    from ..tools.bench.gpu_table import gpu_table, load_report

    try:
        typer.echo(gpu_table(load_report(path)))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--table") from error
