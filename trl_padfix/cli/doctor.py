"""`trl-padfix doctor`."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..versions import TESTED
from .console import JsonOption, one_of, outputs, write_json


if TYPE_CHECKING:
    from ..tools.doctor import Diagnosis, ModelReport


__all__ = ["describe", "doctor"]


def doctor(
    model: Annotated[str | None, typer.Option(help="Path or Hub id of a model: whether and how it is packed.")] = None,
    attn: Annotated[str | None, typer.Option(help="Attention implementation that is to run.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default what suits the accelerator.")
    ] = None,
    json: JsonOption = None,
    explain: Annotated[
        str | None,
        typer.Option(help="Text of an error, or '-' to read it from standard input: its cause and what to do."),
    ] = None,
) -> None:
    """Say what runs here and how a model is packed, or explain an error; 1 if what was asked for cannot run."""
    outputs(json=json)
    if explain is not None:
        if model or attn or dtype:
            raise typer.BadParameter("looks at a text alone; leave the other options out.", param_hint="--explain")
        raise typer.Exit(_explain(sys.stdin.read() if explain == "-" else explain, json))
    if dtype is not None:
        one_of("--dtype", dtype, ["float32", "float16", "bfloat16"])

    from ..tools.doctor import diagnose

    found = diagnose(model, attn, dtype)
    for line in describe(found):
        typer.echo(line)
    write_json(json, found.to_dict())
    raise typer.Exit(1 if found.problems else 0)


def describe(found: Diagnosis) -> list[str]:
    """What `trl-padfix doctor` prints: the verdict first, in lines of at most 80 characters."""
    attention = f"`{found.auto.name}` attention"
    if found.problems:
        verdict = ["NOT READY.", *found.problems]
    elif found.model is None:
        verdict = [f"READY. Padding can be removed here, with {attention}."]
    else:
        refused = any(mixer.how == "whole rows" for mixer in found.model.mixers)
        sharing = "; prefix_sharing is refused, because its decoder is given whole rows" if refused else ""
        verdict = [f"READY. {found.model.architecture}: padding is removed exactly, with {attention}{sharing}."]
    lines = [line for text in verdict for line in _wrapped("", text)]
    lines += ["", *_machine(found), *_packages(found), *_attention(found)]
    if found.model is not None:
        lines += ["", *_model(found.model)]
    return lines


def _machine(found: Diagnosis) -> list[str]:
    system, machine = found.system, found.machine
    count = Counter(f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)" for gpu in system["gpus"])
    gpus = ", ".join(f"{n} x {name}" for name, n in count.items()) or f"{machine.name} ({system['cores']} cores)"
    capability = f", compute capability {'.'.join(map(str, c))}" if (c := machine.capability) else ""
    precisions = ", ".join(f"{name} ({word})" for name, word in found.dtypes.items())
    return _wrapped("machine", f"{gpus}{capability}; {precisions}")


def _packages(found: Diagnosis) -> list[str]:
    there = ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)
    absent = ", ".join(name for name, version in found.versions.items() if not version)
    tested = ", ".join(f"{pair.transformers} with {pair.trl}" for pair in TESTED)
    pair = "transformers and TRL are a pair that is tested together"
    if not found.tested:
        pair = f"transformers and TRL are not a pair that is tested together; tested: {tested}"
    return [*_wrapped("packages", there), *(_wrapped("absent", absent) if absent else []), *_wrapped("stack", pair)]


def _attention(found: Diagnosis) -> list[str]:
    lines = ["", f"attention in {found.dtype}:"]
    groups: dict[tuple[str, str], list[str]] = {}
    for backend in found.backends:
        state = "runs" if backend.usable and backend.packs else "padded only" if backend.usable else "cannot run"
        # Of a model, names alone; without one, the first obstacle. All of them are in the JSON.
        reason = "" if found.model is not None else backend.obstacles[0] if backend.obstacles else backend.note
        groups.setdefault((state, reason), []).append(backend.name)
    for state in ("runs", "padded only", "cannot run"):
        for (group, reason), names in groups.items():
            if group == state:
                lines += _wrapped(state, ", ".join(names) + (f": {reason}" if reason else ""))
    for command in found.to_install():
        lines.append(f"{'to install':12}{command}")  # as it is typed, so not wrapped
    return lines


def _model(model: ModelReport) -> list[str]:
    lines = _wrapped("model", f"{model.name}: {model.architecture} ({model.family})")
    if model.refusal:
        return lines
    lines += _wrapped("text", "packed")
    if model.images != "no images":
        lines += _wrapped("images", model.images)
    groups: dict[tuple[str, str, str], list[str]] = {}
    for mixer in model.mixers:
        groups.setdefault((mixer.module, mixer.how, mixer.why), []).append(mixer.name)
    for (module, how, why), names in groups.items():
        count = "" if len(names) == 1 else f" and {len(names) - 1} more"
        lines += _wrapped("layers", f"{names[0]}{count} ({module}): {how}{f', {why}' if why else ''}")
    if model.rows_share:
        lines += _wrapped("rows", f"{model.rows_share:.0%} of the decoder's work runs on rows, the rest is packed")
    if model.checks_padding_side:
        lines += _wrapped("side", "this transformers refuses padded batches on FlashAttention 2; packed ones pass")
    return lines


def _wrapped(label: str, text: str) -> list[str]:
    """A line with its label, continued below itself; words are not cut."""
    indent = " " * 12 if label else "  "
    first = f"{label:12}" if label else ""
    return textwrap.wrap(
        text, 80, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _explain(text: str, json: Path | None) -> int:
    """Print what is known of a text; the exit status."""
    from ..tools.known_errors import KNOWN_ERRORS, explain, last_error

    errors = explain(text)
    for error in errors:
        lines = _wrapped("cause", error.cause) + _wrapped("what to do", error.fix)
        lines += _wrapped("text from", error.source)
        typer.echo("\n".join([error.name, *(f"  {line}" for line in lines)]))
    if not errors:
        looked_for = last_error(text) or "an empty text"
        said = _wrapped("", "This error is not known here.")
        said += _wrapped("looked for", f"{looked_for} (and the lines above it, in {len(KNOWN_ERRORS)} known errors)")
        said += _wrapped(
            "what to do",
            "Give the whole traceback to `trl-padfix doctor --explain -`: what brought it about may be further up. "
            "Then report it: an issue with the command or script, the whole traceback, and the file that "
            "`trl-padfix doctor --json doctor.json` writes.",
        )
        typer.echo("\n".join(said))
    write_json(json, [asdict(error) for error in errors])
    return 0 if errors else 1
