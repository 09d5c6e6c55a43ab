"""`trl-padfix doctor`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Optional

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from ..core.compat import TESTED
from .console import console, one_of


if TYPE_CHECKING:
    from ..tools.doctor import Diagnosis


__all__ = ["doctor"]


def doctor(
    model: Annotated[Optional[str], typer.Option(help="Path or Hub id: what becomes of it.")] = None,  # noqa: UP045
    attn: Annotated[Optional[str], typer.Option(help="Attention implementation that is to run.")] = None,  # noqa: UP045
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="float32, float16 or bfloat16; by default what suits the accelerator."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explain: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Text of an error, or '-' to read it from standard input: its cause and what to do."),
    ] = None,
) -> None:
    """Say what is installed, which attention can run and why, what becomes of a model, and what an error means."""
    if explain is not None:
        if model or attn or dtype:
            raise typer.BadParameter("looks at a text alone; leave the other options out.", param_hint="--explain")
        raise typer.Exit(_explain(sys.stdin.read() if explain == "-" else explain, json))
    if dtype is not None:
        one_of("--dtype", dtype, ["float32", "float16", "bfloat16"])

    from ..tools.doctor import diagnose

    found = diagnose(model, attn, dtype)
    if json:
        console.print_json(data=found.to_dict())
    else:
        _show(found)
    raise typer.Exit(1 if found.problems else 0)


def _show(found: Diagnosis) -> None:
    versions = _table("package", "version")
    for name, version in found.versions.items():
        versions.add_row(name, version or "-")
    console.print(versions)
    console.print(
        "transformers and TRL are a pair that is tested together"
        if found.tested
        else "transformers and TRL are no pair that is tested together; tested: "
        + ", ".join(f"{pair.transformers} with {pair.trl}" for pair in TESTED)
    )
    capability = f", compute capability {'.'.join(map(str, c))}" if (c := found.machine.capability) else ""
    console.print(f"\naccelerator: {found.machine.name} ({found.machine.device}{capability})")
    console.print("precision: " + ", ".join(f"{name} ({word})" for name, word in found.dtypes.items()))

    backends = _table("attention", "usable", "packed", "why")
    for backend in found.backends:
        backends.add_row(backend.name, _yes(backend.usable), _yes(backend.packs), escape(backend.reason))
    console.print(f"\nattention in {found.dtype}, of padded and of packed batches:")
    console.print(backends)
    for backend in found.backends:
        if backend.install:
            console.print(f"{backend.name}: {backend.install}", soft_wrap=True, highlight=False)
    console.print(f"\n'auto' is {found.auto.name}: {escape(found.auto.note)}")

    if (model := found.model) is not None:
        console.print(f"\n{model.name}: {model.family}, {model.architecture}")
        refused = f"refused: {escape(model.refusal)}" if model.refusal else "exact"
        if any(mixer.how == "whole rows" for mixer in model.mixers):
            refused = "exact, and prefix sharing refused: it is given whole rows"
        console.print(f"padding-free and prefix sharing: {refused}")
        if any(mixer.how != "packed" for mixer in model.mixers):
            console.print("how its layers run (all that computes each token by itself is packed):")
            for mixer in model.mixers:
                why = f": {mixer.why}" if mixer.why else ""
                console.print(f"  {mixer.name} ({mixer.module}) {mixer.how}{why}", soft_wrap=True, highlight=False)
        console.print(
            "padding_side: this transformers raises its error for padded batches on FlashAttention 2; packed ones pass"
            if model.checks_padding_side
            else "padding_side: this transformers has no such check for it"
        )
    for problem in found.problems:
        console.print(f"\n[bold]cannot run[/bold] {escape(problem)}")


def _explain(text: str, json: bool) -> int:
    """Print what is known of a text; the exit status."""
    from ..tools.known_errors import explain

    errors = explain(text)
    if json:
        console.print_json(data=[asdict(error) for error in errors])
    for error in () if json else errors:
        console.print(f"[bold]{escape(error.name)}[/bold]\n  cause: {escape(error.cause)}\n  fix: {escape(error.fix)}")
    if not errors and not json:
        console.print("This error is not known here. `trl-padfix doctor` shows what is installed and what can run.")
    return 0 if errors else 1


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE)
    for column in columns:
        table.add_column(column)
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "no"
