"""`trl-padfix doctor`: options and printing; [`~trl_padfix.tools.doctor`] does the work."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ..files import refuse_missing
from ..versions import TESTED


if TYPE_CHECKING:
    from ..tools.doctor import Diagnosis, ModelReport


__all__ = ["describe", "doctor"]


def doctor(
    model: Annotated[str | None, Option(help="Path or Hub id of a model to diagnose.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what runs here and how a model is packed; exit with 1 if the model cannot run."""
    if model is not None:
        refuse_missing(model, "--model", True, ("config.json",))
    with redirect_stdout(sys.stderr):  # what other packages print
        from ..tools.doctor import diagnose

        diagnosis = diagnose(model)
    typer.echo(json.dumps(asdict(diagnosis), indent=2) if as_json else "\n".join(describe(diagnosis)))
    raise typer.Exit(1 if diagnosis.problems else 0)


def describe(diagnosis: Diagnosis) -> list[str]:
    """The printed lines of a diagnosis, of at most 80 characters, the verdict first."""
    system, machine, versions, model = diagnosis.system, diagnosis.machine, diagnosis.versions, diagnosis.model
    exact = f"{model.architecture}: padding is removed exactly" if model else "Padding can be removed here"
    ready = f"READY. {exact}, with `{diagnosis.auto}` attention."
    count = Counter(f"{gpu['name']} ({gpu['memory_gib']:.0f} GiB)" for gpu in system["gpus"])
    names = [f"{n} x {name}" for name, n in count.items()] or [f"{machine.device.upper()} ({system['cores']} cores)"]
    capability = f", compute capability {'.'.join(map(str, c))}" if (c := machine.capability) else ""
    tested = "" if diagnosis.tested else "; tested: " + ", ".join(f"{t.transformers} with {t.trl}" for t in TESTED)
    pair = f"transformers and TRL are {'not ' if tested else ''}a pair that is tested together{tested}"
    lines = [
        *(("", text) for text in (["NOT READY.", *diagnosis.problems] if diagnosis.problems else [ready])),
        ("", ""),
        ("machine", f"{', '.join(names)}{capability}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("absent", ", ".join(name for name, version in versions.items() if not version)),
        ("stack", pair if versions["trl"] else "no TRL: `remove_padding` and the callback run, no trainer"),
        ("", ""),
        ("", f"packed attention in {diagnosis.dtype}:"),
        *_attention(diagnosis),
    ]
    return _wrapped(lines + ([] if model is None else [("", ""), *_model(model)]))


def _attention(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    groups: dict[str | None, list[str]] = {None: []}
    for name, obstacle in diagnosis.attention.items():
        groups.setdefault(obstacle, []).append(name)
    return [
        ("cannot run" if obstacle else "runs", ", ".join(names) + (f": {obstacle}" if obstacle else ""))
        for obstacle, names in groups.items()
    ]


def _model(model: ModelReport) -> list[tuple[str, str]]:
    lines = [("model", f"{model.name}: {model.architecture} ({model.family})")]
    if model.refusal:
        return lines
    lines += [("text", "packed"), ("images", "packed" if model.images else "")]
    groups: dict[tuple[str, ...], list[str]] = {}
    for mixer in model.mixers:
        name, *kind = mixer.values()
        groups.setdefault(tuple(kind), []).append(name)
    for (module, how, why), names in groups.items():
        count = "" if len(names) == 1 else f" and {len(names) - 1} more"
        lines.append(("layers", f"{names[0]}{count} ({module}): {how}{f', {why}' if why else ''}"))
    return lines


def _wrapped(lines: Iterable[tuple[str, str]]) -> list[str]:
    """Texts wrapped at words, with their labels on the left; a label without a text is left out."""
    result = []
    for label, text in lines:
        first, below = (f"{label:12}", " " * 12) if label else ("", "  ")
        wrapped = textwrap.wrap(
            text, 80, initial_indent=first, subsequent_indent=below, break_long_words=False, break_on_hyphens=False
        )
        result += wrapped or ([] if label else [""])  # no label and no text is an empty line
    return result
