"""RLOO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl

from .online import OnlineTask, OnlineTrainer, trained_tokens


__all__ = ["RLOOTrainer"]


class RLOOTask(OnlineTask):
    """Rows come in groups: completions of one prompt; each completion is one action."""

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {"": torch.tensor(len(batch["prompt_ids"])), "entropy": trained_tokens(batch)}


class RLOOTrainer(OnlineTrainer, trl.RLOOTrainer):
    """
    TRL's [`~trl.RLOOTrainer`] without padding, like [`GRPOTrainer`].

    With `prefix_sharing`, gradient accumulation and no token budget, the completions of a group stay in one
    micro-batch.

    Args:
        *args, **kwargs:
            As [`~trl.RLOOTrainer`]. `args` may be this package's [`RLOOConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`].
        KeyError: TRL's, for a missing `prompt` column.

    Example:

    ```python
    from trl_padfix import RLOOConfig, RLOOTrainer

    args = RLOOConfig(output_dir="runs/rloo", padding_free=True, prefix_sharing="auto")
    trainer = RLOOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=shorter, args=args, train_dataset=prompts)
    trainer.train()  # columns of the data: prompt; a reward function as for GRPO
    ```
    """

    task_class = RLOOTask
