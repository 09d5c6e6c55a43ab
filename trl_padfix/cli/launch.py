"""
TRL's training scripts with this package's trainers and configurations: what `trl-padfix dpo` has `accelerate` launch.

[`main`] calls the `main` of `trl.scripts.dpo` (or of another method) and lets it find our classes where it imports
TRL's. Flags, YAML, data mixtures, rewards and whatever comes after training are TRL's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from argparse import Namespace

    from trl import TrlParser

__all__ = ["METHODS", "main", "make_parser", "parse"]

METHODS = {"dpo": "DPO", "sft": "SFT", "reward": "Reward", "kto": "KTO", "grpo": "GRPO", "rloo": "RLOO"}
"""Commands, and what the names of their trainers and configurations begin with."""


def make_parser(method: str) -> TrlParser:
    """
    The parser of TRL's script for our configuration, whose own fields `--help` shows first.

    Args:
        method (`str`):
            One of [`METHODS`].
    """
    from transformers import TrainingArguments

    with _ours_in_trl(method) as (_, config):
        parser = importlib.import_module(f"trl.scripts.{method}").make_parser(prog=f"trl-padfix {method}")
    parser.usage = "%(prog)s [--config FILE.yaml] [--accelerate_config NAME_OR_FILE] [--FIELD VALUE ...]"
    parser.epilog = "Flags of `accelerate launch` are taken too, here and in the YAML."
    mixins = [c for c in config.__mro__ if c.__module__ == config.__module__ and not issubclass(c, TrainingArguments)]
    own = {field.name for mixin in mixins for field in fields(mixin)}
    rest, group = parser._optionals, parser.add_argument_group("padding removal")
    group._group_actions = [action for action in rest._group_actions if action.dest in own]
    rest._group_actions = [action for action in rest._group_actions if action.dest not in own]
    parser._action_groups.insert(0, parser._action_groups.pop())
    return parser


def parse(method: str, args: Sequence[str]) -> tuple[list[Any], Namespace]:
    """
    Read the flags of a command, and the YAML that they name.

    Args:
        method (`str`):
            One of [`METHODS`].
        args (`Sequence[str]`):
            Flags of TRL's script, of our configuration and of `accelerate launch`, in any order.

    Returns:
        `tuple[list, Namespace]`: what the parser of the script makes of them (script, training, model and data
        arguments), and what `accelerate launch` is to be called with to run the script with the same flags.

    Raises:
        ValueError: For flags and keys that neither of them knows.

    Example:

    ```python
    >>> from trl_padfix.cli.launch import parse

    >>> (_, config, *_), launch = parse("dpo", ["--padding_free", "true", "--use_cpu", "--num_processes", "2"])
    >>> type(config).__module__, config.padding_free, launch.num_processes
    ('trl_padfix.trainers.config', True, 2)

    ```
    """
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    *parsed, others = make_parser(method).parse_args_and_config(args, return_remaining_strings=True)
    others = resolve_accelerate_config_argument(others)
    script = ["--module", "trl_padfix.cli.launch", method, *args]
    launch, unknown = launch_command_parser().parse_known_args([*others, *script])
    if unknown or launch.training_script_args != script[2:]:
        unknown = unknown or [launch.training_script]
        raise ValueError(
            f"{' '.join(unknown)}: neither a field of `trl-padfix {method}` nor a flag of `accelerate launch`. "
            f"`trl-padfix {method} --help` lists the fields; a YAML of them is given with `--config`."
        )
    return parsed, launch


def main(method: str, args: Sequence[str]) -> None:
    """
    Train, in this process, as TRL's script does.

    Args:
        method (`str`):
            One of [`METHODS`].
        args (`Sequence[str]`):
            Flags, as for [`parse`].
    """
    import torch
    from transformers import set_seed

    parsed, _ = parse(method, args)
    # TRL's script ends the process group while its DDP model lives. If the model were the last to hold the group, its
    # end would wait for the threads of gloo, and they for the interpreter: `trl dpo` on CPU hangs in one of two runs.
    _group = torch.distributed.group.WORLD
    set_seed(parsed[1].seed)  # `test_split_size` draws the held-out rows: the same ones in every process
    with _ours_in_trl(method):
        importlib.import_module(f"trl.scripts.{method}").main(*parsed)


@contextmanager
def _ours_in_trl(method: str) -> Iterator[tuple[type, type]]:
    """Let `from trl import ...` find our trainer and configuration of a method until the block ends."""
    import trl

    import trl_padfix

    names = [f"{METHODS[method]}{kind}" for kind in ("Trainer", "Config")]
    trainer, config = (getattr(trl_padfix, name) for name in names)
    theirs = {name: getattr(trl, name) for name in names}
    vars(trl).update(zip(names, (trainer, config), strict=True))
    try:
        yield trainer, config
    finally:
        vars(trl).update(theirs)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
