"""GRPO without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl
from packaging.version import Version

from ..core.errors import PaddingRemovalError
from .online import OnlineTask, OnlineTrainer, trained_tokens


__all__ = ["GRPOTrainer"]


class GRPOTask(OnlineTask):
    """Groups of completions."""

    extremes = {"clip_ratio/low_min": torch.min, "clip_ratio/high_max": torch.max}

    def check(self, config: Any, given: dict[str, Any]) -> None:
        super().check(config, given)
        if self.trainer.padding.settings.padding_free and _trains_padding(config):
            raise PaddingRemovalError(
                f"`loss_type='luspo'` of TRL {trl.__version__} takes the gradient of padding, too, unless the loss of "
                "a sequence has one value: https://github.com/huggingface/trl/pull/6654. Update TRL to 1.10, set "
                "`importance_sampling_level='sequence'` and `beta=0`, or leave `padding_free` out."
            )

    def loss_weight(self, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        trainer, of_rows = self.trainer, super().loss_weight(piece, whole)
        by_entropy = getattr(trainer, "_entropy_bonus_enabled", False) or trainer.top_entropy_quantile < 1
        if of_rows is None or by_entropy or getattr(trainer, "use_liger_kernel", False):
            return None
        if trainer.loss_type in ("cispo", "dapo", "vespo"):  # divided by the tokens of a generation
            return 1.0
        if trainer.loss_type == "bnpo":
            return trained_tokens(piece) / trained_tokens(whole).clamp(min=1)
        return of_rows if trainer.loss_type in ("grpo", "dr_grpo", "luspo", "sapo") else None

    def metric_items(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        by_row = ["vespo/phi_seq_mean"]
        if self.trainer.importance_sampling_level == "sequence":
            by_row += ["cispo_clip_ratio", *(f"clip_ratio/{name}_mean" for name in ("low", "high", "region"))]
        return super().metric_items(batch) | dict.fromkeys(by_row, torch.tensor(len(batch["prompt_ids"])))

    def sums_over_rows(self) -> bool:
        trainer = self.trainer
        bonus = getattr(trainer, "_entropy_bonus_enabled", False)  # TRL 1.0 had none
        return trainer.loss_type != "bnpo" and not bonus and trainer.top_entropy_quantile == 1.0


def _trains_padding(config: Any) -> bool:
    """Whether TRL's loss has a value for each token of a completion, and does not mask its padding."""
    weighed = config.use_vllm and config.vllm_importance_sampling_mode.startswith("token")
    by_token = config.importance_sampling_level == "token" or config.beta or config.top_entropy_quantile < 1 or weighed
    return config.loss_type == "luspo" and by_token and Version(trl.__version__) < Version("1.10")


class GRPOTrainer(OnlineTrainer, trl.GRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] without padding.

    Takes what TRL's takes. With `padding_free=True` in its configuration the decoder of policy and reference computes
    real tokens only wherever log-probabilities are taken; with `prefix_sharing=True` the prompt of a group is computed
    once for all its completions. Generation is TRL's, and so are losses, rewards and gradients.

    With `prefix_sharing=True`, gradient accumulation and a loss that is a sum over completions (every `loss_type` but
    `"bnpo"`, no entropy bonus, `top_entropy_quantile=1`), the completions of a group are brought together in one
    micro-batch of their optimizer step, where TRL scatters them. The step is the same; metrics that are means over
    micro-batches are means over other micro-batches.

    Logs `perf/tokens_per_second` (real tokens of the policy's forwards per second, generation included),
    `padfix/pad_fraction` and `padfix/shared_fraction` beside TRL's metrics.

    Args:
        *args, **kwargs:
            As [`~trl.GRPOTrainer`]. `args` may be this package's [`GRPOConfig`] or TRL's.

    Raises:
        PaddingRemovalError: If padding cannot be removed from the model with exact results.
        ParityError: On the first batch, if the packed and the padded forward differ.
        ValueError: For a missing `prompt` column, and for prompts without a token.

    Example:

    ```python
    from trl_padfix import GRPOConfig, GRPOTrainer


    def shorter(completions, **columns):
        return [-len(completion) for completion in completions]


    args = GRPOConfig(output_dir="runs/grpo", padding_free=True, prefix_sharing=True)
    trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=shorter, args=args, train_dataset=prompts)
    trainer.train()  # columns of the data: prompt
    ```
    """

    task_class = GRPOTask
