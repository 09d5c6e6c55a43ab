"""
TRL's training scripts with this package's trainers and configurations: what `accelerate launch` runs.

    accelerate launch -m trl_padfix.train dpo --config recipe.yaml

[`main`] calls the `main` of `trl.scripts.dpo` (or of another trainer) and lets it find our classes where it would
import TRL's, so flags, YAML, data mixtures, rewards and everything after training are TRL's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import trl
from transformers import TrainingArguments, set_seed

import trl_padfix

from .config import PackingConfig


__all__ = ["METHODS", "main", "make_parser"]

METHODS = {"dpo": "DPO", "sft": "SFT", "reward": "Reward", "kto": "KTO", "grpo": "GRPO", "rloo": "RLOO"}
"""Commands, and what their trainers and configurations begin with."""


def make_parser(method: str, prog: str | None = None) -> trl.TrlParser:
    """
    The parser of TRL's script, with this package's configuration, whose own fields `--help` shows first.

    Args:
        method (`str`):
            One of [`METHODS`].
        prog (`str`, *optional*):
            Command that is being parsed, as the help names it.

    Example:

    ```python
    >>> from trl_padfix.train import make_parser

    >>> _, config, model, _ = make_parser("dpo").parse_args_and_config(["--padding_free", "true", "--use_cpu"])
    >>> type(config).__module__, config.padding_free
    ('trl_padfix.config', True)

    ```
    """
    with _ours_in_trl(method):
        parser = importlib.import_module(f"trl.scripts.{method}").make_parser(prog=prog)
    config = getattr(trl_padfix, f"{METHODS[method]}Config")
    mixins = [c for c in config.__mro__ if issubclass(c, PackingConfig) and not issubclass(c, TrainingArguments)]
    own = {f.name for mixin in mixins for f in fields(mixin)}
    group = parser.add_argument_group("padding removal")
    rest, group._group_actions = parser._optionals, [a for a in parser._actions if a.dest in own]
    rest._group_actions = [action for action in rest._group_actions if action.dest not in own]
    parser._action_groups.insert(0, parser._action_groups.pop())
    return parser


def main(method: str, args: Sequence[str] | None = None) -> None:
    """
    Train, in this process, as `trl.scripts.<method>` does.

    Args:
        method (`str`):
            One of [`METHODS`].
        args (`Sequence[str]`, *optional*):
            Flags; by default those of this process. Flags of `accelerate launch` in a YAML are passed over.
    """
    # A YAML may hold what `accelerate launch` takes. `trl-padfix` told unknown names before.
    parsed = make_parser(method).parse_args_and_config(args, fail_with_unknown_args=False)
    set_seed(parsed[1].seed)  # `test_split_size` draws the held-out rows: the same ones in every process
    with _ours_in_trl(method):
        importlib.import_module(f"trl.scripts.{method}").main(*parsed)


@contextmanager
def _ours_in_trl(method: str) -> Iterator[None]:
    """Let `from trl import ...` find our trainer and configuration of a method until the block ends."""
    names = [f"{METHODS[method]}{kind}" for kind in ("Trainer", "Config")]
    ours: dict[str, Any] = {name: getattr(trl_padfix, name) for name in names}
    theirs = {name: getattr(trl, name) for name in names}
    vars(trl).update(ours)
    try:
        yield
    finally:
        vars(trl).update(theirs)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
