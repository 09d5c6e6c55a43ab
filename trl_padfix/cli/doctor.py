"""`trl-padfix doctor`."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ..versions import TESTED
from .console import JsonOption, one_of, outputs, write_json


if TYPE_CHECKING:
    from ..tools.doctor import Diagnosis, ModelReport


__all__ = ["describe", "doctor"]


def doctor(
    model: Annotated[str | None, Option(help="Path or Hub id of a model: whether and how it is packed.")] = None,
    attn: Annotated[str | None, Option(help="Attention implementation that is to run.")] = None,
    dtype: Annotated[
        str | None, Option(help="float32, float16 or bfloat16; by default what suits the accelerator.")
    ] = None,
    json: JsonOption = None,
    explain: Annotated[
        str | None,
        Option(help="Text of an error, or '-' to read it from standard input: its cause and what to do."),
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
    system, machine, versions = found.system, found.machine, found.versions
    count = Counter(f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)" for gpu in system["gpus"])
    gpus = ", ".join(f"{n} x {name}" for name, n in count.items()) or f"{machine.name} ({system['cores']} cores)"
    capability = f", compute capability {'.'.join(map(str, c))}" if (c := machine.capability) else ""
    precisions = ", ".join(f"{name} ({word})" for name, word in found.dtypes.items())
    tested = ", ".join(f"{pair.transformers} with {pair.trl}" for pair in TESTED)
    pair = "a pair that is tested together"
    lines = [
        *(("", text) for text in _verdict(found)),
        ("", ""),
        ("machine", f"{gpus}{capability}; {precisions}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("absent", ", ".join(name for name, version in versions.items() if not version)),
        ("stack", f"transformers and TRL are {pair if found.tested else f'not {pair}; tested: {tested}'}"),
        ("", ""),
        ("", f"attention in {found.dtype}:"),
        *_attention(found),
    ]
    to_install = [f"{'to install':12}{command}" for command in found.to_install()]  # as it is typed, so not wrapped
    return _wrapped(lines) + to_install + ([] if found.model is None else ["", *_wrapped(_model(found.model))])


def _verdict(found: Diagnosis) -> list[str]:
    if found.problems:
        return ["NOT READY.", *found.problems]
    attention = f"`{found.auto.name}` attention"
    if found.model is None:
        return [f"READY. Padding can be removed here, with {attention}."]
    refused = any(mixer.how == "whole rows" for mixer in found.model.mixers)
    sharing = "; prefix_sharing is refused, because its decoder is given whole rows" if refused else ""
    return [f"READY. {found.model.architecture}: padding is removed exactly, with {attention}{sharing}."]


def _attention(found: Diagnosis) -> list[tuple[str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for backend in found.backends:
        state = "runs" if backend.usable and backend.packs else "padded only" if backend.usable else "cannot run"
        # Of a model, names alone; without one, the first obstacle. All of them are in the JSON.
        reason = "" if found.model is not None else backend.obstacles[0] if backend.obstacles else backend.note
        groups.setdefault((state, reason), []).append(backend.name)
    states = ("runs", "padded only", "cannot run")
    return [
        (state, ", ".join(names) + (f": {reason}" if reason else ""))
        for (state, reason), names in sorted(groups.items(), key=lambda group: states.index(group[0][0]))
    ]


def _model(model: ModelReport) -> list[tuple[str, str]]:
    lines = [("model", f"{model.name}: {model.architecture} ({model.family})")]
    if model.refusal:
        return lines
    lines += [("text", "packed"), ("images", "" if model.images == "no images" else model.images)]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for mixer in model.mixers:
        groups.setdefault((mixer.module, mixer.how, mixer.why), []).append(mixer.name)
    for (module, how, why), names in groups.items():
        count = "" if len(names) == 1 else f" and {len(names) - 1} more"
        lines.append(("layers", f"{names[0]}{count} ({module}): {how}{f', {why}' if why else ''}"))
    if model.rows_share:
        lines.append(("rows", f"{model.rows_share:.0%} of the decoder's work runs on rows, the rest is packed"))
    if model.checks_padding_side:
        lines.append(("side", "this transformers refuses padded batches on FlashAttention 2; packed ones pass"))
    return lines


def _wrapped(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Texts with their labels, continued below themselves; words are not cut, and labels without a text left out."""
    found = []
    for label, text in lines:
        first, below = (f"{label:12}", " " * 12) if label else ("", "  ")
        wrapped = textwrap.wrap(
            text, 80, initial_indent=first, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
        )
        found += wrapped or ([] if label else [""])
    return found


def _explain(text: str, json: Path | None) -> int:
    """Print what is known of a text; the exit status."""
    from ..tools.known_errors import KNOWN_ERRORS, explain, last_error

    errors = explain(text)
    for error in errors:
        lines = _wrapped([("cause", error.cause), ("what to do", error.fix), ("text from", error.source)])
        typer.echo("\n".join([error.name, *(f"  {line}" for line in lines)]))
    if not errors:
        looked_for = last_error(text) or "an empty text"
        advice = (
            "Give the whole traceback to `trl-padfix doctor --explain -`: what brought it about may be further up. "
            "Then report it: an issue with the command or script, the whole traceback, and the file that "
            "`trl-padfix doctor --json doctor.json` writes."
        )
        known = f"(and the lines above it, in {len(KNOWN_ERRORS)} known errors)"
        lines = [("looked for", f"{looked_for} {known}"), ("what to do", advice)]
        typer.echo("\n".join(["This error is not known here.", *_wrapped(lines)]))
    write_json(json, [asdict(error) for error in errors])
    return 0 if errors else 1
