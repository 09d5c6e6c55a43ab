"""The errors of `known_errors.yaml`, which users paste into `doctor --explain`: cause, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import yaml


__all__ = ["KNOWN_ERRORS", "KnownError", "explain", "last_error"]


@dataclass(frozen=True)
class KnownError:
    """An error and its explanation; `known_errors.yaml` says what each field holds."""

    name: str
    pattern: str
    cause: str
    fix: str
    source: str


KNOWN_ERRORS = [
    KnownError(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
]


def explain(text: str) -> list[KnownError]:
    """
    The known errors in a text, such as a traceback; none if it holds none.

    What to do begins with what the installed packages say of a name in the text: where an argument belongs, or where
    TRL has it.
    """
    line = " ".join(text.split())
    found = [error for error in KNOWN_ERRORS if re.search(error.pattern, line, re.IGNORECASE)]
    return [replace(e, fix=_LOOKED_UP[e.name](line) + e.fix) if e.name in _LOOKED_UP else e for e in found]


def last_error(text: str) -> str:
    """The last line of a text that names an error, or its last line; at most 200 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|Exception|Warning|Interrupt|Exit)\b(:|$)", line)]
    return (errors or lines or [""])[-1][:200]


def _place_of_argument(line: str) -> str:
    """Where the argument belongs, by the fields of the configurations and the arguments of the trainers."""
    found = re.search(
        r"(\w*?)(Trainer|Config|TrainingArguments)\.__init__\(\) got an unexpected keyword argument '(\w+)'", line
    )
    if found is None:
        return ""
    method, kind, argument = found.groups()
    config, trainer = f"{method}Config", f"{method}Trainer"
    try:
        import trl_padfix

        known = [name for name in trl_padfix.__all__ if name.endswith("Config")]
        names = {name: {field.name for field in fields(getattr(trl_padfix, name))} for name in known}
        taken = signature(getattr(trl_padfix, trainer)).parameters if config in names else {}
    except Exception:  # of packages that do not fit together, of which the text may well be the message
        return ""
    if argument in names.get(config, ()):
        return f"`{argument}` is a field of `{config}`: `{trainer}(..., args={config}({argument}=...))`. "
    if kind == "Config" and argument in taken:
        return f"`{argument}` is an argument of `{trainer}`. "
    near = get_close_matches(argument, names.get(config, ()), cutoff=0.75)
    others = [name for name in known if argument in names[name]]
    said = [f"`{config}` has no `{argument}`"] if config in names else []
    said += [f"its nearest fields: {_listed(near)}"] if near else []
    said += [f"configurations with `{argument}`: {_listed(others)}"] if others else []
    return f"{'; '.join(said)}. " if near or others else ""


def _place_in_trl(line: str) -> str:
    """Where the installed TRL has a name, by its files: nothing is imported for it."""
    found, trl = re.search(r"cannot import name '(\w+)' from 'trl\b", line), find_spec("trl")
    if found is None or trl is None or trl.origin is None:
        return ""
    root = Path(trl.origin).parent
    inits = [root / "__init__.py", *root.glob("experimental/*/__init__.py")]
    places = [path for path in inits if f'"{found[1]}"' in path.read_text("utf-8")]
    if not places:
        return "The TRL that is installed here has it nowhere. "
    if places[0].parent == root:
        return "The TRL that is installed here has it: is there a folder or file `trl` beside the script? "
    return f"Here it is `from trl.experimental.{places[0].parent.name} import {found[1]}`. "


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_LOOKED_UP = {
    "an argument that moved to the configuration": _place_of_argument,
    "a field that TRL does not have any more": _place_of_argument,
    "a name that TRL does not have": _place_in_trl,
}
"""What is known of the very argument or name of an error; empty if nothing is."""
