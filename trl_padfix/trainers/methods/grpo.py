"""GRPO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl

from .online import OnlineTask, OnlineTrainer, trained_tokens


__all__ = ["GRPOTrainer"]


class GRPOTask(OnlineTask):
    """Rows come in groups: completions of one prompt, whose rewards are compared."""

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        trainer = self.trainer
        # The entropy of a token is compared with the entropy of all tokens of the batch; Liger's loss is one fused
        # call.
        uses_entropy = trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1
        if uses_entropy or getattr(trainer, "use_liger_kernel", False):
            return None
        if trainer.loss_type in ("cispo", "dapo", "vespo"):  # sums over tokens, divided by the tokens of a generation
            return 1.0
        if trainer.loss_type == "bnpo":  # a mean over the tokens of the batch
            return trained_tokens(chunk) / trained_tokens(batch).clamp(min=1)
        is_row_mean = trainer.loss_type in ("grpo", "dr_grpo", "luspo", "sapo")
        return super().chunk_weight(chunk, batch, num_items) if is_row_mean else None

    def num_metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        by_row = ["vespo/phi_seq_mean"]
        if self.trainer.importance_sampling_level == "sequence":
            by_row += ["cispo_clip_ratio", *(f"clip_ratio/{name}_mean" for name in ("low", "high", "region"))]
        return super().num_metric_items(batch) | dict.fromkeys(by_row, torch.tensor(len(batch["prompt_ids"])))

    def rows_are_independent(self) -> bool:
        trainer = self.trainer
        return not (trainer.loss_type == "bnpo" or trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1)


class GRPOTrainer(OnlineTrainer, trl.GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] without padding.

    It has the arguments of TRL's trainer. With `padding_free=True` in its configuration the decoders of policy and
    reference compute real tokens only, in all forwards for log-probabilities. With `prefix_sharing` the prompt of
    a group is computed once for all its completions. Generation, losses, rewards and gradients are TRL's.

    TRL scatters the completions of a group over the micro-batches of an optimizer step. With `prefix_sharing`,
    gradient accumulation, no token budget and a loss that is a sum over completions (every `loss_type` except
    `"bnpo"`, no entropy bonus, `top_entropy_quantile=1`), they are moved into one micro-batch. The step stays the
    same; metrics that are means over micro-batches change, because the micro-batches do.

    Logs `perf/tokens_per_second` (real tokens of the policy's forwards per second, generation included),
    `padfix/pad_fraction` and `padfix/shared_fraction` in addition to TRL's metrics.

    Args:
        *args, **kwargs:
            As [`~trl.GRPOTrainer`]. `args` may be this package's [`GRPOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batches, if packed results of a model are wrong.
        KeyError: TRL's, for a missing `prompt` column.

    Example:

    ```python
    from trl_padfix import GRPOConfig, GRPOTrainer


    def shorter(completions, **columns):
        return [-len(completion[0]["content"]) for completion in completions]


    args = GRPOConfig(output_dir="runs/grpo", padding_free=True, prefix_sharing="auto")
    trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=shorter, args=args, train_dataset=prompts)
    trainer.train()  # columns of the data: prompt
    ```
    """

    task_class = GRPOTask
