"""Reward models without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl
import trl.trainer.reward_trainer as trl_reward
from transformers import TrainingArguments

from ...core.anatomy import find_pretrained
from ..base import PaddingFreeMixin
from ..data.collators import DataCollatorForReward
from ..task import PairTask


__all__ = ["RewardTrainer"]


class RewardTask(PairTask):
    """Rows are pairs of sequences; the model gives each sequence a score."""

    generates_rows = False
    collators = {trl_reward.DataCollatorForPreference: DataCollatorForReward}
    sequences = (("chosen_ids",), ("rejected_ids",))
    min_max_metrics = {"min_reward": torch.min, "max_reward": torch.max}

    def check(self, config: TrainingArguments | None, init_kwargs: dict[str, Any]) -> None:
        model = init_kwargs.get("model")
        if isinstance(model, torch.nn.Module) and find_pretrained(model).get_output_embeddings() is not None:
            raise ValueError(
                f"{type(model).__name__} scores every next token, but a reward model scores a whole sequence. Load "
                "it with `AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`, or pass its id."
            )

    def model_for_loss(self, model: torch.nn.Module) -> Any:
        def forward(margin: Any = None, **inputs: Any) -> Any:
            # TRL calls the model with the whole batch. Layers pass unknown arguments on to their attention, which
            # would receive `margin` together with its mask.
            return model(**inputs)

        return forward


class RewardTrainer(PaddingFreeMixin, trl.RewardTrainer):
    """
    TRL's [`~trl.RewardTrainer`] without padding, like [`DPOTrainer`].

    Rewards, losses, metrics and gradients equal the padded computation's. One exception: `pool_last_token=True`
    scores the last token of each row even if it is the pad token.

    Args:
        *args, **kwargs:
            As [`~trl.RewardTrainer`]. `args` may be this package's [`RewardConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`].
        ValueError: For a model with a language-modeling head.
        KeyError: TRL's, for missing columns.

    Example:

    ```python
    from trl_padfix import RewardConfig, RewardTrainer

    args = RewardConfig(output_dir="runs/reward", padding_free=True, prefix_sharing="auto")
    trainer = RewardTrainer("Qwen/Qwen2.5-0.5B-Instruct", args=args, train_dataset=pairs)
    trainer.train()  # columns of the data: chosen, rejected
    ```
    """

    task_class = RewardTask
