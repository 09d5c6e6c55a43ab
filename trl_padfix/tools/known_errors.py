"""Find the errors of `known_errors.yaml` in a text, for `doctor --explain`: their cause, and how to fix them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import yaml

from .reading import shortened


__all__ = ["KNOWN_ERRORS", "KnownError", "explain", "last_error"]


@dataclass(frozen=True)
class KnownError:
    """An error and its explanation; the top of `known_errors.yaml` describes each field."""

    name: str
    pattern: str
    cause: str
    fix: str
    source: str
    doing: str
    """What the reader was doing: the heading above the entry."""


KNOWN_ERRORS = [
    KnownError(**entry, doing=doing)
    for doing, entries in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")).items()
    for entry in entries
]


def explain(text: str) -> list[KnownError]:
    """
    The known errors in a text, such as a traceback.

    If the text names an argument or an import of TRL, the fix begins with its place in the installed packages.
    """
    line = " ".join(text.split())  # terminals wrap lines of a traceback
    errors = [error for error in KNOWN_ERRORS if re.search(error.pattern, line, re.IGNORECASE)]
    return [replace(e, fix=_LOOKUPS[e.name](line) + e.fix) if e.name in _LOOKUPS else e for e in errors]


def last_error(text: str) -> str:
    """The last line of a text that names an error, or else its last line; about 200 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception|Warning|Interrupt|Exit)\b(:|$)", line)]
    return shortened((errors or lines or [""])[-1], 200)


def _find_argument(line: str) -> str:
    """A sentence on the place of an unexpected argument: a field of a configuration, or an argument of a trainer."""
    match = re.search(
        r"(\w*?)(Trainer|Config|TrainingArguments)\.__init__\(\) got an unexpected keyword argument '(\w+)'", line
    )
    if match is None:
        return ""
    method, kind, argument = match.groups()
    config, trainer = f"{method}Config", f"{method}Trainer"
    try:
        import trl_padfix

        configs = [name for name in trl_padfix.__all__ if name.endswith("Config")]
        names = {name: {field.name for field in fields(getattr(trl_padfix, name))} for name in configs}
        parameters = signature(getattr(trl_padfix, trainer)).parameters if config in names else {}
    except Exception:  # packages may not fit together, and the text may be the error of just that
        return ""
    if argument in names.get(config, ()):
        return f"`{argument}` is a field of `{config}`: `{trainer}(..., args={config}({argument}=...))`. "
    if kind == "Config" and argument in parameters:
        return f"`{argument}` is an argument of `{trainer}`. "
    near = get_close_matches(argument, names.get(config, ()), cutoff=0.75)
    others = [name for name in configs if argument in names[name]]
    clauses = [f"`{config}` has no `{argument}`"] if config in names else []
    clauses += [f"its nearest fields: {_listed(near)}"] if near else []
    clauses += [f"configurations with `{argument}`: {_listed(others)}"] if others else []
    return f"{'; '.join(clauses)}. " if near or others else ""


def _find_in_trl(line: str) -> str:
    """A sentence on the place of a name in the installed TRL, found in its files without an import."""
    match, trl = re.search(r"cannot import name '(\w+)' from 'trl(?:_padfix)?\b", line), find_spec("trl")
    if match is None or trl is None or trl.origin is None:
        return ""
    root = Path(trl.origin).parent
    inits = [root / "__init__.py", *root.glob("experimental/*/__init__.py")]
    places = [path for path in inits if f'"{match[1]}"' in path.read_text("utf-8")]
    if not places:
        return "The TRL that is installed here has it nowhere. "
    if places[0].parent == root:
        return "The TRL that is installed here has it: is there a folder or file `trl` beside the script? "
    return f"Here it is `from trl.experimental.{places[0].parent.name} import {match[1]}`. "


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_LOOKUPS = {
    "an argument that moved to the configuration": _find_argument,
    "a field that TRL does not have any more": _find_argument,
    "a name that TRL does not have": _find_in_trl,
}
"""Functions that look up the argument or name in the text of an error; they return "" if there is nothing to say."""
