"""Distillation without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import trl

from ..core.model.find import find_pretrained
from .batching.config import OnlineBudgetConfig
from .checks import require_teacher
from .config import PackingConfig, TeacherAttentionConfig
from .field_types import help_from_docstring
from .online import OnlineTask, OnlineTrainer, trained_tokens


__all__ = ["DistillationConfig", "DistillationTrainer"]


@help_from_docstring
@dataclass
class DistillationConfig(TeacherAttentionConfig, OnlineBudgetConfig, PackingConfig, trl.DistillationConfig):
    """
    TRL's [`~trl.DistillationConfig`] with padding removal.

    There is no `padding_side`: prompts are padded left and completions right, as generation leaves them.

    Args:
        padding_free, prefix_sharing, parity_check, stop_on_nonfinite, attn_implementation, max_tokens_per_batch:
            As in [`GRPOConfig`], of the forwards of student and teacher.
        teacher_attn_implementation (`str` or `dict[str, str]`, *optional*):
            Attention implementation of the teacher model: a name, 'auto', or for a vision model a name for each part.
            By default that which it is loaded with.
        **kwargs:
            All fields of [`~trl.DistillationConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> args = DistillationConfig("runs/distillation", padding_free=True, use_cpu=True, bf16=False)

    ```
    """


class DistillationTask(OnlineTask):
    """Rows are prompts with a completion each, of which student and teacher compute hidden states."""

    scores = "_get_last_hidden_state"

    def check(self, config: Any, given: dict[str, Any]) -> None:
        super().check(config, given)
        require_teacher(given)

    def loss_weight(self, piece: dict[str, Any], whole: dict[str, Any]) -> Any:
        if whole.get("num_items_in_batch") is not None:  # what the divergence of each piece is divided by
            return 1.0
        return trained_tokens(piece) / trained_tokens(whole).clamp(min=1)

    def scoring_module(self, model: Any) -> Any:
        return find_pretrained(model).base_model  # TRL hands hidden states to its chunked divergence


class DistillationTrainer(OnlineTrainer, trl.DistillationTrainer):
    """
    TRL's [`~trl.DistillationTrainer`] without padding, as [`GRPOTrainer`] is, in the forwards of student and teacher.

    `prefix_sharing=True` computes once what prompts have in common at their beginning (a system prompt, the same
    prompt drawn twice). Generation, the chunked divergence and the gradients are TRL's.

    Args:
        *args, **kwargs:
            As [`~trl.DistillationTrainer`]. `args` may be this package's [`DistillationConfig`] or TRL's.

    Raises:
        PaddingRemovalError, ParityError: As [`DPOTrainer`], for one of the models.
        ValueError: For no teacher, a missing `prompt` column, and for prompts without a token.

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

    def _get_last_hidden_state(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        with self.scoring(input_ids, attention_mask):
            return super()._get_last_hidden_state(model, input_ids, attention_mask, *args, **kwargs)
