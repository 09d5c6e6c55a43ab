"""Explains flags, and keys of a YAML, that neither the script of a training nor `accelerate launch` takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .methods import METHODS


if TYPE_CHECKING:
    from trl import TrlParser

__all__ = ["unknown_flags", "unknown_message"]


def unknown_flags(parser: TrlParser, args: Sequence[str], recipe: dict[str, Any]) -> list[str]:
    """Flags, and keys of the YAML, that neither the script's parser nor `accelerate launch` has."""
    from accelerate.commands.launch import launch_command_parser

    actions = [*parser._actions, *launch_command_parser()._actions]
    supported = {flag for action in actions for flag in action.option_strings} | {"--config", "--accelerate_config"}
    flags = [arg.split("=")[0] for arg in args if arg.startswith("--")]
    keys = [f"--{key}" for key in recipe if key != "env"]
    spelled = [(flag, flag.replace("-", "_")) for flag in (*flags, *keys)]
    # argparse accepts the beginning of a flag.
    return [flag for flag, under in spelled if not any(s.startswith((flag, under)) for s in supported)]


def unknown_message(
    method: str, parser: TrlParser, unknown: Sequence[str], args: Sequence[str], config: str | None
) -> str:
    """The error for flags and keys that nothing takes: where each stands, and which name is likely to be meant."""
    flags = [word for word in unknown if word.startswith("--")]
    given = {_name(arg.split("=")[0]) for arg in args}
    supported = {flag.removeprefix("--") for action in parser._actions for flag in action.option_strings}

    def described(word: str) -> str:
        name = _name(word)
        if config is None or word not in flags or name in given:
            return word
        line = _line_of(config, name)  # TRL makes a flag of each key
        return f"the key `{name}` ({config}{'' if line is None else f', line {line}'})"

    words = map(described, flags or unknown)  # of flags without their values
    clues = [clue for flag in flags if (clue := _clue(_name(flag), method, supported))]
    return " ".join([
        f"{' '.join(words)}: neither a field of `trl-padfix {method}` nor a flag of `accelerate launch`.",
        *clues,
        f"`trl-padfix {method} --help` lists the fields; a YAML of them is given with `--config`.",
    ])  # fmt: skip


def _name(flag: str) -> str:
    """The name of the field that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")


def _clue(name: str, method: str, supported: Collection[str]) -> str:
    """A sentence on what an unknown field may be: a misspelt one, or one of another trainer; empty for neither."""
    near = get_close_matches(name, [flag for flag in supported if "-" not in flag], n=1, cutoff=0.75)
    if near:
        return f"Is `{near[0]}` meant?"
    others = [
        f"`trl-padfix {command}`"
        for command, trainer in METHODS.items()
        if command != method and name in _fields_of(f"{trainer}Config")
    ]
    return f"`{name}` is a field of {', '.join(others)}." if others else ""


def _fields_of(config: str) -> set[str]:
    """The fields of one of our configurations; none if the installed TRL is too old for it."""
    import trl_padfix

    try:
        return {field.name for field in fields(getattr(trl_padfix, config))}
    except ImportError:
        return set()


def _line_of(config: str, key: str) -> int | None:
    """The line of a key at the top of a YAML, counted from 1."""
    import yaml

    root = yaml.compose(Path(config).read_text("utf-8"))
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return next((node.start_mark.line + 1 for node, _ in pairs if node.value == key), None)
