"""
TRL's training scripts with the trainers and configurations of this package; `accelerate` launches this module.

[`main`] calls the `main` of `trl.scripts.dpo` (or of another method) while `trl` holds our classes instead of its own.
Flags, YAML, data mixtures, rewards and all work after training are TRL's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from . import disable_telemetry, require_extra
from .methods import METHODS
from .unknown_fields import unknown_flags, unknown_message


if TYPE_CHECKING:
    from argparse import Namespace

    from trl import TrlParser

__all__ = ["main", "make_parser", "parse", "run"]

TINY = ("dpo", "sft")
"""Methods that can train a tiny model that is built on the spot."""

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""Builders of `datasets` for data files, by their endings."""


def make_parser(method: str) -> TrlParser:
    """The parser of TRL's script for our configuration; its `--help` shows the fields of this package first."""
    from transformers import TrainingArguments

    with _patched_trl(method) as (_, config):
        parser = _script(method).make_parser(prog=f"trl-padfix {method}")
    parser.usage = "%(prog)s [--config FILE.yaml] [--accelerate_config NAME_OR_FILE] [--FIELD VALUE ...]"
    parser.epilog = "Flags of `accelerate launch` are taken too, here and in the YAML."
    package = __name__.partition(".")[0]
    ours = [c for c in config.__mro__ if c.__module__.partition(".")[0] == package]
    mixins = [c for c in ours if not issubclass(c, TrainingArguments)]
    our_fields = {field.name for mixin in mixins for field in fields(mixin)} | {"tiny_model"}
    rest, group = parser._optionals, parser.add_argument_group("padding removal")
    # argparse cannot move an action to another group: the lists that `--help` prints are changed.
    group._group_actions = [action for action in rest._group_actions if action.dest in our_fields]
    rest._group_actions = [action for action in rest._group_actions if action.dest not in our_fields]
    parser._action_groups.insert(0, parser._action_groups.pop())  # the new group comes first
    return parser


def parse(method: str, args: Sequence[str]) -> tuple[list[Any], Namespace]:
    """
    Read the flags and the YAML of a command.

    Args:
        method (`str`):
            One of [`METHODS`].
        args (`Sequence[str]`):
            Flags of TRL's script, of our configuration and of `accelerate launch`, in any order.

    Returns:
        `tuple`: The parsed script, training, model and data arguments, and the arguments of the `accelerate launch`
        that runs the script with the same flags.

    Raises:
        ValueError: For flags and keys that neither of them has, and for values that they refuse.
    """
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    from ..files import folder_obstacle
    from ..tools.data import load_recipe
    from ..trainers.checkpoints import checkpoint_to_resume

    parser = make_parser(method)
    config = _config_of(args)
    recipe = load_recipe(config) if config is not None else {}  # its errors name the file
    if not args:
        raise ValueError(
            f"nothing is given to train. `trl-padfix {method} --config FILE.yaml` reads a recipe (`trl-padfix recipe "
            "list` names those that ship), or give at least `--model_name_or_path` and `--dataset_name`."
        )
    try:
        *parsed, others = parser.parse_args_and_config(args, return_remaining_strings=True)
    except ValueError as error:
        if unknown := unknown_flags(parser, args, recipe):  # a misspelt flag may be the reason for a refused value
            raise ValueError(unknown_message(method, parser, unknown, args, config)) from error
        if "setup doesn't support bf16" in str(error):
            raise ValueError(_without_bf16(args, config, recipe)) from error
        raise
    others = resolve_accelerate_config_argument(others)
    script = ["--module", "trl_padfix.cli.launch", method, *args]
    launch, unknown = launch_command_parser().parse_known_args([*others, *script])
    if unknown or launch.training_script_args != script[2:]:
        unknown = unknown or [launch.training_script]
        raise ValueError(unknown_message(method, parser, unknown, args, config))
    script_arguments, training, model = parsed[:3]
    training.resume_from_checkpoint = checkpoint_to_resume(training.resume_from_checkpoint, training.output_dir)
    if reason := folder_obstacle(training.output_dir):
        raise ValueError(f"`output_dir`: {reason}")
    for arguments in parsed:
        _check_paths(arguments)
    if not (model.model_name_or_path or getattr(script_arguments, "tiny_model", None)):
        tiny = " (or `--tiny_model tiny`, which is built on the spot)" if method in TINY else ""
        raise ValueError(f"no model is given: set `--model_name_or_path` to a folder or a Hub id{tiny}.")
    return parsed, launch


def _check_paths(arguments: Any) -> None:
    """Raise a `ValueError` if parsed arguments name a model or a dataset that is not there, or a file as a dataset."""
    from ..files import is_missing_path

    for field in ("model_name_or_path", "dataset_name"):
        if (name := getattr(arguments, field, None)) and is_missing_path(name):
            raise ValueError(f"`{field}`: there is no file or folder {name!r} here ({Path.cwd()}).")
    # TRL hands the name to `load_dataset`, which takes a file's for one of the Hub.
    if builder := BUILDERS.get((path := Path(getattr(arguments, "dataset_name", None) or "")).suffix):
        wrong = "is a file" if path.is_file() else "names a file, and there is none here"
        raise ValueError(
            f"`dataset_name`: {str(path)!r} {wrong}. Give a folder or a Hub id; in a YAML (`--config`) a file is "
            f"`datasets: [{{path: {builder}, data_files: {path}}}]`."
        )


def _without_bf16(args: Sequence[str], config: str | None, recipe: dict[str, Any]) -> str:
    """The error for a machine without bfloat16, with the settings to change."""
    import torch

    if torch.cuda.is_available():
        why, flag = "this GPU has none", "fp16"
    else:
        why, flag = f"torch {torch.__version__} finds no GPU here", "use_cpu"
    words = [word.split("=")[0] for word in args]
    if "--bf16" in words:  # a flag overrides the YAML
        return f"`--bf16` turns bf16 on, and {why}. To train without it, give `--bf16 false --{flag} true`."
    source = f"`bf16: {recipe['bf16']}` stands in {config}" if "bf16" in recipe else "bf16 is on, which is the default"
    lines = f"set `bf16: false` and `{flag}: true` in {config}" if config else f"add `--bf16 false --{flag} true`"
    return f"{source}, and {why}. To train without it, {lines}."


def _config_of(args: Sequence[str]) -> str | None:
    """The path of the YAML in the flags."""
    if "--config" not in args:
        return None
    following = args[args.index("--config") + 1 :]
    if not following:
        raise ValueError("`--config` is the last word: the path of a YAML belongs after it.")
    return following[0]


def main(method: str, args: Sequence[str]) -> None:
    """Train in this process with TRL's script; for the flags see [`parse`]."""
    import torch
    from transformers import set_seed

    from . import recipe_run

    parsed, _ = parse(method, args)
    # TRL's script destroys the process group while its DDP model is alive. If the model held the last reference, its
    # destructor would wait for the threads of gloo, which wait for the interpreter: half of the runs of `trl dpo` on
    # CPU hang. This reference outlives the model.
    _group = torch.distributed.group.WORLD
    set_seed(parsed[1].seed)  # `test_split_size` draws the held-out rows: the same ones in every process
    if method in TINY:
        parsed[2].model_name_or_path = recipe_run.model_to_train(*parsed)
        set_seed(parsed[1].seed)
    with ExitStack() as stack:
        stack.enter_context(_patched_trl(method, reports=True))
        _script(method).main(*parsed)


def run(method: str, args: Sequence[str]) -> None:
    """Run [`main`] in a launched process, where a mistake of the user is a message and an exit code, too."""
    require_extra()
    from .user_errors import explain_errors

    disable_telemetry()
    rank = f" (process {rank})" if (rank := os.environ.get("RANK")) is not None else ""
    with explain_errors(f"trl-padfix {method}{rank}"):
        main(method, args)


def _script(method: str) -> Any:
    """The module of TRL's script."""
    return importlib.import_module(f"trl.scripts.{method}")


@contextmanager
def _patched_trl(method: str, reports: bool = False) -> Iterator[tuple[type, type]]:
    """
    Within the block `from trl import ...` imports our trainer and configuration; with `reports` the trainer writes a
    report at the end.
    """
    import trl

    import trl_padfix

    from . import recipe_run

    names = [f"{METHODS[method]}{kind}" for kind in ("Trainer", "Config")]
    trainer, config = (getattr(trl_padfix, name) for name in names)
    ours = dict(zip(names, (trainer, config), strict=True))
    if reports:
        more = (recipe_run.to_dialogues,) if method == "sft" else ()
        ours[names[0]] = recipe_run.reporting(trainer, *more)
    if method in TINY:
        ours["ScriptArguments"] = recipe_run.RecipeArguments
    with patch.multiple(trl, **ours):
        yield trainer, config


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
