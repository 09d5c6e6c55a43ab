"""Distillation without padding."""

from __future__ import annotations

from typing import Any

import torch
import trl
from transformers import TrainingArguments

from ...core.anatomy import find_pretrained
from ..base import hook
from ..checks.arguments import require_teacher
from .online import OnlineTask, OnlineTrainer, trained_tokens


__all__ = ["DistillationTrainer"]


class DistillationTask(OnlineTask):
    """Each row is a prompt with a completion; student and teacher compute its hidden states."""

    def check(self, config: TrainingArguments, init_kwargs: dict[str, Any]) -> None:
        super().check(config, init_kwargs)
        require_teacher(init_kwargs)

    def chunk_weight(self, chunk: dict[str, Any], batch: dict[str, Any], num_items: Any) -> Any:
        if batch.get("num_items_in_batch") is not None:  # TRL divides by it, so the losses of chunks add up
            return 1.0
        return trained_tokens(chunk) / trained_tokens(batch).clamp(min=1)

    def scoring_module(self, model: torch.nn.Module) -> Any:
        return find_pretrained(model).base_model  # TRL computes the chunked divergence from hidden states


class DistillationTrainer(OnlineTrainer, trl.DistillationTrainer):
    """
    TRL's [`~trl.DistillationTrainer`] without padding in the forwards of student and teacher, like [`GRPOTrainer`].

    `prefix_sharing` computes shared prefixes of prompts once: a system prompt, the same prompt drawn twice.
    Generation, the chunked divergence and the gradients are TRL's.

    Args:
        *args, **kwargs:
            As [`~trl.DistillationTrainer`]. `args` may be this package's [`DistillationConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`], for one of the models.
        ValueError: For a missing teacher.
        KeyError: TRL's, for a missing `prompt` column.

    Example:

    ```python
    from trl_padfix import DistillationConfig, DistillationTrainer

    args = DistillationConfig(output_dir="runs/distillation", padding_free=True)
    student, teacher = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"
    trainer = DistillationTrainer(student, teacher, args=args, train_dataset=prompts)
    trainer.train()  # columns of the data: prompt
    ```
    """

    task_class = DistillationTask

    @hook
    def _get_last_hidden_state(
        self, model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        with self.padding.budget.split_forwards(input_ids, attention_mask):
            return super()._get_last_hidden_state(model, input_ids, attention_mask, *args, **kwargs)
