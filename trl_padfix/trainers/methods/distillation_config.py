"""The configuration of distillation, apart from `config.py` because TRL has it since 1.16."""

from dataclasses import dataclass

import trl

from ..field_types import configuration
from ..settings import ForwardBudgetConfig, PackingConfig, TeacherAttentionConfig


__all__ = ["DistillationConfig"]


@configuration
@dataclass
class DistillationConfig(TeacherAttentionConfig, ForwardBudgetConfig, PackingConfig, trl.DistillationConfig):
    """
    TRL's [`~trl.DistillationConfig`] with padding removal.

    There is no `padding_side`: prompts are padded left and completions right, as generation leaves them.

    Args:
        padding_free, prefix_sharing, parity_check, strict, packed_multiple_of,
        attn_implementation, max_tokens_per_batch:
            As in [`GRPOConfig`], for the forwards of student and teacher.
        teacher_attn_implementation (`str` or `dict[str, str]`, *optional*):
            Like `attn_implementation`, but for the teacher. By default the teacher keeps the attention that it is
            loaded with.
        **kwargs:
            All fields of [`~trl.DistillationConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> from trl_padfix import DistillationConfig

    >>> args = DistillationConfig("runs/distillation", padding_free=True, use_cpu=True, bf16=False)

    ```
    """
