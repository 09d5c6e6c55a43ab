"""
Runs LLaMA-Factory with the callback: use this module instead of `llamafactory-cli train`.

    python -m trl_padfix.integrations.llamafactory config.yaml            # with `padfix_prefix_sharing: true` in it
    torchrun --nproc-per-node 2 -m trl_padfix.integrations.llamafactory config.yaml
"""

from __future__ import annotations

from typing import Any

from ..versions import require_stack
from .callback import PREFIX, PaddingRemovalCallback, settings_in


require_stack("llamafactory")

from llamafactory.hparams import read_args  # noqa: E402
from llamafactory.train.tuner import run_exp  # noqa: E402


__all__ = ["train"]


def train(config: dict[str, Any] | None = None) -> None:
    """
    Run LLaMA-Factory's `run_exp` with a [`PaddingRemovalCallback`].

    Args:
        config (`dict`, *optional*):
            Keys of LLaMA-Factory's YAML, and `padfix_prefix_sharing`, `padfix_parity_check` and
            `padfix_pool_last_token`. By default it is read from the command line as in `llamafactory-cli train`: a
            file, and `key=value` after it.

    Raises:
        ValueError: For another key with the prefix `padfix_`, and without a file.
    """
    arguments = read_args(config)
    if not isinstance(arguments, dict):  # without a file it is the list of the command line
        raise ValueError(f"Name a YAML first (`config.yaml key=value ...`); the command line is {arguments}.")
    callback = PaddingRemovalCallback(**settings_in(arguments))
    run_exp({key: value for key, value in arguments.items() if not key.startswith(PREFIX)}, callbacks=[callback])


if __name__ == "__main__":
    train()
