"""
Runs LLaMA-Factory with the callback: use this module instead of `llamafactory-cli train`, which stops at the key.

    python -m trl_padfix.integrations.llamafactory config.yaml            # with `padfix_prefix_sharing: auto` in it
    torchrun --nproc-per-node 2 -m trl_padfix.integrations.llamafactory config.yaml
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import Trainer

from ..core.context import temporarily_set
from ..versions import require_stack
from .callback import PACKS, PREFIX, callback_from


require_stack("llamafactory")

from llamafactory.hparams import read_args  # noqa: E402
from llamafactory.train.tuner import run_exp  # noqa: E402


__all__ = ["train"]

KEY = f"{PREFIX}prefix_sharing"
"""A required key. `llamafactory-cli train` refuses a file that has it, and so never trains this file padded."""


def train(config: dict[str, Any] | None = None) -> None:
    """
    Run LLaMA-Factory's `run_exp` with a [`PaddingRemovalCallback`].

    Args:
        config (`dict`, *optional*):
            Keys of LLaMA-Factory's YAML, and `padfix_prefix_sharing`; if needed other arguments of the callback with
            this prefix. By default it is read from the command line as in `llamafactory-cli train`: a
            file, and `key=value` after it.

    Raises:
        ValueError: For an unknown key with the prefix `padfix_`, without `padfix_prefix_sharing`, without a file, and
            for rows that are packed already.
    """
    arguments = read_args(config)
    if not isinstance(arguments, dict):  # without a file it is the list of the command line
        raise ValueError(f"Name a YAML file first (`config.yaml key=value ...`); got {arguments}.")
    callback = callback_from(arguments, without="`llamafactory-cli train`")
    if KEY not in arguments:
        raise ValueError(
            f"`{KEY}` is missing: set it to true, false or auto in the YAML. Without it `llamafactory-cli train` "
            "would silently train the same file padded."
        )
    by_default = {"packing": arguments.get("stage") == "pt"}  # LLaMA-Factory packs the rows of pretraining
    if packs := [key for key in ("packing", "neat_packing") if arguments.get(key, by_default.get(key))]:
        default = "" if packs[0] in arguments else " (the default of `stage: pt`)"
        raise ValueError(
            f"`{packs[0]}: true`{default} {PACKS} Set `{packs[0]}: false`, or start it with `llamafactory-cli train`."
        )
    start = Trainer.train

    @wraps(start)
    def attach_and_start(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if callback in trainer.callback_handler.callbacks:
            callback.attach(trainer)
        return start(trainer, *args, **kwargs)

    with temporarily_set(Trainer, train=attach_and_start):  # `run_exp` makes the trainer and calls its `train`
        run_exp({key: value for key, value in arguments.items() if not key.startswith(PREFIX)}, callbacks=[callback])


if __name__ == "__main__":
    train()
