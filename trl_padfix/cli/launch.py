"""
TRL's training scripts with the trainers and configurations of this package; `accelerate` launches this module.

[`main`] calls the `main` of `trl.scripts.dpo` (or of another method) while `trl` holds our classes instead of its own.
Flags, YAML, data mixtures, rewards and all work after training are TRL's.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from . import INTERRUPTED, METHODS, disable_telemetry
from .config_file import check_given, name_of, read_given


if TYPE_CHECKING:
    from argparse import Namespace

    from trl import TrlParser

__all__ = ["main", "make_parser", "one_interrupt", "parse", "run"]

HELP = {
    "attn_implementation": "Attention: a name, or 'auto' (an installed FlashAttention, else `sdpa`, else `eager`).",
    "no_parity_check": "Skip the parity check. Same as `--parity_check false`.",
}
"""Help of flags that TRL and transformers describe otherwise."""


def make_parser(method: str) -> TrlParser:
    """The parser of TRL's script for our configuration; its `--help` shows the fields of this package first."""
    from transformers import TrainingArguments
    from transformers.hf_argparser import string_to_bool

    config = _class(method, "Config")
    # TRL's script imports our classes from `trl` in this block.
    with patch.multiple("trl", **{config.__name__: config}):
        parser = importlib.import_module(f"trl.scripts.{method}").make_parser(prog=f"trl-padfix {method}")
    parser.usage = "%(prog)s [--config FILE.yaml] [--accelerate_config NAME_OR_FILE] [--FIELD VALUE ...]"
    parser.epilog = (
        "`--config`: a YAML of these fields, which flags override. `--accelerate_config`: a file, or a name of TRL's. "
        "`--resume_from_checkpoint`: a folder, or `latest`. Flags of `accelerate launch` work too, also in a YAML."
    )
    about = "Check settings, data, model and the first batch without training or writing files."
    flag: Any = dict(nargs="?", const=True, default=False, type=string_to_bool, help=about)
    parser.add_argument("--dry_run", "--dry-run", **flag)
    about = "Train a random Qwen2 of this shape, with a tokenizer trained on the data, built in `output_dir`."
    parser.add_argument("--tiny_model", "--tiny-model", choices=("tiny", "small"), help=about)
    ours = [c for c in config.__mro__ if c.__module__.startswith("trl_padfix.")]
    names = {field.name for c in ours if not issubclass(c, TrainingArguments) for field in fields(c)}
    # argparse cannot move an action to another group: the lists that `--help` prints are changed.
    group, others = parser.add_argument_group("padding removal"), parser._optionals
    for action in [a for a in others._group_actions if a.dest in {*names, *HELP, "dry_run", "tiny_model"}]:
        others._group_actions.remove(action)
        action.help = HELP.get(name_of(action.option_strings[0]), action.help)
        group._group_actions.append(action)
    for action in parser._actions[1:]:  # in `--help`: one spelling of a flag, and its values
        action.option_strings = action.option_strings[:1]
        is_flag = "string_to_bool" in str(action.type)  # TRL has a copy of this function
        action.metavar = "true|false" if is_flag and not action.metavar else action.metavar
    parser._action_groups.insert(0, parser._action_groups.pop())
    return parser


def parse(method: str, args: Sequence[str], is_command: bool = False) -> tuple[list[Any], Namespace]:
    """
    Read the flags and the YAML of a command.

    Args:
        method (`str`):
            One of [`METHODS`].
        args (`Sequence[str]`):
            Flags of TRL's script, of our configuration and of `accelerate launch`, in any order.
        is_command (`bool`, *optional*, defaults to `False`):
            Whether this process launches the ones that train.

    Returns:
        `tuple`: The parsed script, training, model and data arguments and the flags of this command; and the arguments
        of the `accelerate launch` that runs the script with the same flags.

    Raises:
        ValueError: For unknown flags and keys, and for invalid values.
    """
    if {*args} & {"-h", "--help"}:  # before `accelerate` is imported
        make_parser(method).parse_args(["--help"])
    # TRL's parser looks for `--config` as a word of its own.
    args = [part for word in args for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    # Transformers makes `--no_FIELD` only for fields that are true; two flags of accelerate begin with `--no_`.
    args = [re.sub("^--no[_-](?!python|tpu)(.+)", r"--\1=false", word) for word in args]
    given = read_given(args)
    resume_from = check_given(method, given)
    # Imported here, because they take seconds: mistakes above are reported without them.
    unsaid = "The following values were not passed to"  # what it sets where the user set none
    logging.getLogger("accelerate.commands.launch").addFilter(lambda record: unsaid not in record.getMessage())
    from accelerate.commands.launch import default_config_file, launch_command_parser
    from torch.cuda import device_count
    from transformers import TrainingArguments
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser = make_parser(method)
    classes, parser.dataclass_types = parser.dataclass_types, []
    others = resolve_accelerate_config_argument(parser.parse_args_and_config(args, return_remaining_strings=True)[-1])
    script = ["--module", "trl_padfix.cli.launch", method, *args]
    launch, unknown = launch_command_parser().parse_known_args([*others, *script])
    if unknown or launch.training_script_args != script[2:]:
        raise ValueError(f"Unexpected argument `{' '.join(unknown or [launch.training_script])}`.")
    chosen = {"cpu", "mpirun_hostfile", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm"}
    file = Path(launch.config_file or default_config_file)
    text = file.read_text("utf-8") if file.is_file() else ""
    says_how = text and not re.search(r"distributed_type: \W?NO\b", text)
    is_chosen = says_how or any(vars(launch)[name] for name in chosen)
    if not is_chosen and (launch.num_processes or 1) > 1:
        launch.multi_gpu = True  # else accelerate runs one process where it finds no two GPUs
    parser.dataclass_types = classes
    listed = re.search(r"\bnum_processes\W+(\d+)", text)
    count = launch.num_processes or (int(listed[1]) if listed else max(1, device_count()))
    with patch.object(TrainingArguments, "world_size", count) if is_command else nullcontext():  # else GRPO counts 1
        *parsed, _ = parser.parse_args_and_config(args, return_remaining_strings=True)
    parsed[1].resume_from_checkpoint = resume_from
    parsed[1].run_name = parsed[1].run_name and str(parsed[1].run_name)
    return parsed, launch


def main(method: str, args: Sequence[str]) -> None:
    """Train in this process with TRL's script; for the flags see [`parse`]."""
    import torch
    import trl
    from accelerate.utils import broadcast_object_list
    from datasets import load_dataset
    from transformers import set_seed

    from .. import build_tiny
    from ..trainers.data.columns import needed_columns, require_columns
    from ..trainers.messages import say

    (*parsed, own), _ = parse(method, args)
    script, training, model, data = parsed
    if training.world_size < (launched := int(os.environ.get("LOCAL_WORLD_SIZE", 1))):
        raise ValueError(f"{launched} processes would each train alone, as no GPU was found: set `--use_cpu true`.")
    # TRL's script destroys the process group while its DDP model is alive. If the model held the last reference, its
    # destructor would wait for the threads of gloo, which wait for the interpreter: half of the runs of `trl dpo` on
    # CPU hang. This reference outlives the model.
    _group = torch.distributed.group.WORLD
    initial = Path(training.output_dir) / "initial_model"
    with ExitStack() as stack:
        if own.dry_run:
            (training.output_dir,) = broadcast_object_list([stack.enter_context(tempfile.TemporaryDirectory())])
            initial = initial if initial.exists() else Path(training.output_dir) / "initial_model"
            training.push_to_hub, training.resume_from_checkpoint = False, None
        config, trainer = _class(method, "Config"), _class(method, "Trainer")
        ours = {config.__name__: config, trainer.__name__: _checked(trainer, own.dry_run)}
        stack.enter_context(patch.multiple("trl", **ours))
        if not training.padding_free:
            say("TRL's code computes each step. To remove padding, set `padding_free: true`, `prefix_sharing: auto`.")
        set_seed(training.seed)  # `test_split_size` draws the held-out rows: the same ones in every process
        alone = {"name": script.dataset_config, "streaming": script.dataset_streaming}
        splits = trl.get_dataset(data) if data.datasets else load_dataset(script.dataset_name, **alone)
        for field in ("dataset_train_split", "dataset_test_split")[: 1 if training.eval_strategy == "no" else 2]:
            if (split := vars(script)[field]) not in splits:
                raise ValueError(f"no split {split!r}, which `{field}` names. The data has {', '.join(splits)}.")
            if not vars(training).get("expand_turns"):  # it checks its columns itself, and leaves missing rows out
                columns = needed_columns(method, vars(training).get("dataset_text_field", "text"))
                require_columns(splits[split], split, *columns)
        if own.tiny_model:
            model.model_name_or_path = build_tiny(own.tiny_model, splits[script.dataset_train_split], initial)
        set_seed(training.seed)
        importlib.import_module(f"trl.scripts.{method}").main(*parsed)


def _checked(trainer_class: Any, is_dry_run: bool) -> Callable[..., Any]:
    """A stand-in for the trainer class in TRL's script: it raises an error if no row is left, and ends a dry run."""

    def build(*args: Any, **kwargs: Any) -> Any:
        from ..trainers.dry_run import dry_run

        trainer = trainer_class(*args, **kwargs)
        if isinstance(rows := trainer.train_dataset, Sized) and not len(rows):  # not a stream
            limit = vars(trainer.args).get("max_length")
            raise ValueError(f"no row is left: each prompt or row is too long for max_length={limit}. Raise it.")
        if is_dry_run:
            sys.exit(0 if dry_run(trainer) else 1)
        return trainer

    return build


def run(method: str, args: Sequence[str]) -> None:
    """Run [`main`] in a launched process; a mistake of the user ends it with a message and an exit code."""
    from .user_errors import explain_errors

    disable_telemetry()
    if "LOCAL_RANK" not in os.environ:  # one process: with several visible GPUs it would use `nn.DataParallel`
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    rank = f" (process {rank})" if (rank := os.environ.get("RANK")) is not None else ""
    with explain_errors(f"trl-padfix {method}{rank}"):
        try:
            main(method, args)
        except BrokenPipeError:  # `| head` has closed the output: what is still buffered goes to the null device
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.exit(1)
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                print(f"trl-padfix {method}: {_stopped(read_given(args).values)}", file=sys.stderr)
            sys.exit(INTERRUPTED)


def one_interrupt() -> Callable[..., None]:
    """A handler for Ctrl-C that may come twice: from the shell, and passed on by the command."""
    times = [float("-inf")]

    def handler(number: int, frame: object) -> None:
        times.append(time.monotonic())
        if times[-1] - times[-2] > 1:
            raise KeyboardInterrupt

    return handler


def _stopped(given: dict[str, Any]) -> str:
    """How to resume after Ctrl-C."""
    if not list(Path(given.get("output_dir") or "trainer_output").glob("checkpoint-*")):
        return "stopped before the first checkpoint (`save_steps`): the same command begins from the start."
    return "stopped. To go on from the last checkpoint, add `--resume_from_checkpoint latest` to the same command."


def _class(method: str, kind: str) -> type:
    """Our `"Trainer"` or `"Config"` of a method."""
    return getattr(importlib.import_module("trl_padfix"), f"{METHODS[method]}{kind}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, one_interrupt())
    run(sys.argv[1], sys.argv[2:])
