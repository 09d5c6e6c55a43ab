"""Flags and keys of a YAML that nothing takes, or that are given twice: found before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml


if TYPE_CHECKING:
    from trl import TrlParser

__all__ = ["check_names", "keys_of", "name_of"]

GONE = {
    "torch_dtype": "it is `dtype` now",
    "warmup_ratio": "`warmup_steps` takes a share below 1 too",
    "evaluation_strategy": "it is `eval_strategy` now",
    "max_seq_length": "it is `max_length` now",
    "max_prompt_length": "TRL has it no more: `max_length` limits prompt and completion together",
    "overwrite_output_dir": "leave it out: a run goes on from a checkpoint only with `resume_from_checkpoint`",
    "no_cuda": "it is `use_cpu` now",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "group_by_length": "it is `train_sampling_strategy: group_by_length` now",
}
"""Fields of earlier versions of TRL and transformers, and what to write today."""


def keys_of(path: str) -> dict[str, int]:
    """
    The keys at the top of a YAML, with their lines.

    Raises:
        ValueError: If the file is no YAML of a mapping, or a key stands in it twice.
    """
    try:
        root = yaml.compose(Path(path).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} holds no mapping of fields to values.")
    lines: dict[str, int] = {}
    for node, _ in root.value:
        line = node.start_mark.line + 1
        if node.value in lines:
            raise ValueError(f"{path}: the key `{node.value}` stands in lines {lines[node.value]} and {line}.")
        lines[node.value] = line
    return lines


def check_names(
    method: str, parser: TrlParser, words: Sequence[str], config: str | None, keys: dict[str, int]
) -> None:
    """
    Raises:
        ValueError: For flags and keys that neither the method's script nor `accelerate launch` takes; it names all.
    """
    from accelerate.commands.launch import launch_command_parser

    actions = [*parser._actions, *launch_command_parser()._actions]
    known = {name_of(flag) for action in actions for flag in action.option_strings}
    known |= {"config", "accelerate_config", "env"}
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    # argparse accepts the beginning of a flag.
    unknown = [(flag, name_of(flag)) for flag in flags if not any(name.startswith(name_of(flag)) for name in known)]
    unknown += [(f"{config}, line {line}: {key}", key) for key, line in keys.items() if key not in known]
    if unknown:
        first = f"neither a field of `trl-padfix {method}` (`--help` lists them) nor of `accelerate launch`:"
        lines = [f"  {place}{_instead(name, known)}" for place, name in unknown]
        raise ValueError("\n".join([first, *lines]))


def _instead(name: str, known: set[str]) -> str:
    """What to write in place of a name, in parentheses; empty if nothing is known."""
    close = [f"did you mean `{other}`?" for other in difflib.get_close_matches(name, known, n=1)]
    remark = GONE.get(name) or "".join(close)
    return f" ({remark})" if remark else ""


def name_of(flag: str) -> str:
    """The name of the field that a flag sets."""
    return flag.removeprefix("--").replace("-", "_")
