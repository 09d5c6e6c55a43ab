"""RLOO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl

from .online import OnlineTask, OnlineTrainer, trained_tokens


__all__ = ["RLOOTrainer"]


class RLOOTask(OnlineTask):
    """Groups of completions, each of which is one action."""

    extremes = {"clip_ratio/low_min": torch.min, "clip_ratio/high_max": torch.max}

    def metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"": torch.tensor(len(batch["prompt_ids"])), "entropy": trained_tokens(batch)}


class RLOOTrainer(OnlineTrainer, trl.RLOOTrainer):
    """
    TRL's [`~trl.RLOOTrainer`] without padding.

    Takes what TRL's takes. With `padding_free=True` in its configuration the decoder of policy and reference computes
    real tokens only wherever log-probabilities are taken; with `prefix_sharing=True` the prompt of a group is computed
    once for all its completions, which gradient accumulation does not scatter over micro-batches then. Generation is
    TRL's, and so are losses, rewards and gradients.

    Logs what [`GRPOTrainer`] logs.

    Args:
        *args, **kwargs:
            As [`~trl.RLOOTrainer`]. `args` may be this package's [`RLOOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For a missing `prompt` column, and for prompts without a token.

    Example:

    ```python
    from trl_padfix import RLOOConfig, RLOOTrainer


    def shorter(completions, **columns):
        return [-len(completion) for completion in completions]


    args = RLOOConfig(output_dir="runs/rloo", padding_free=True, prefix_sharing=True)
    trainer = RLOOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=shorter, args=args, train_dataset=prompts)
    trainer.train()  # columns of the data: prompt
    ```
    """

    task_class = RLOOTask
