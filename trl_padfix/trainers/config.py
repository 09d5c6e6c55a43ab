"""
TRL's configurations with our fields.

What a field means is written once, in the docstring of the first configuration that has it; `--help` and the page of
options read it there.
"""

# No `from __future__ import annotations`: until Python 3.10 `get_type_hints`, which TRL's parser calls, takes an
# `InitVar` only where it is not a string.
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import trl

from ..core.attention.backends import Implementation
from .batching.config import BudgetConfig, OnlineBudgetConfig
from .data.collators import check_padding_side
from .data.turns import check_turn_settings
from .field_types import (
    ParityCheck,
    Sharing,
    check_field_types,
    check_packing,
    help_from_docstring,
    parse_implementation,
    temporarily_set,
)
from .generation.config import EvaluationConfig


__all__ = ["DPOConfig", "GRPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"]


@dataclass
class AttentionConfig:
    """
    `attn_implementation`; a mixin, in front of the others.

    Not a dataclass field, because TRL's `ModelConfig` owns the flag `--attn_implementation`: TRL's scripts parse both
    with one parser, which takes a flag only once.
    """

    attn_implementation: InitVar[Implementation | None] = None

    def __post_init__(self, attn_implementation: Implementation | None) -> None:
        self.attn_implementation = attn_implementation
        for name in (f"{of}attn_implementation" for of in ("", "ref_", "teacher_")):
            if hasattr(self, name):
                setattr(self, name, parse_implementation(getattr(self, name)))
        super().__post_init__()  # type: ignore[misc]

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"attn_implementation": self.attn_implementation}  # type: ignore[misc]


@dataclass
class ReferenceAttentionConfig(AttentionConfig):
    """`attn_implementation`, and `ref_attn_implementation` for trainers with a reference model."""

    ref_attn_implementation: dict[str, Any] | str | None = None


@dataclass
class TeacherAttentionConfig(AttentionConfig):
    """`attn_implementation`, and `teacher_attn_implementation` for trainers with a teacher model."""

    teacher_attn_implementation: dict[str, Any] | str | None = None


@dataclass
class PackingConfig:
    """Fields that every configuration of this package adds to TRL's; a mixin, in front of TRL's class."""

    padding_free: bool = False
    prefix_sharing: Sharing = field(default=False, metadata={"nargs": "?", "const": True})
    parity_check: ParityCheck = field(default=True, metadata={"nargs": "?", "const": True})
    stop_on_nonfinite: bool = False
    cp_attention: str = field(default="heads", metadata={"choices": ["heads", "keys"]})

    def __post_init__(self) -> None:
        check_field_types(self)
        check_packing(self)
        # TRL refuses context parallelism where it generates; `ContextParallel` says what is refused of ours.
        with temporarily_set(self, "parallelism_config", None) if self.padding_free else nullcontext():
            super().__post_init__()  # type: ignore[misc]


@dataclass
class PaddingConfig(PackingConfig):
    """[`PackingConfig`] and `padding_side`, for trainers with a collator."""

    padding_side: str | None = field(default=None, metadata={"choices": ["left", "right"]})

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side, optional=True)
        super().__post_init__()


@help_from_docstring
@dataclass
class DPOConfig(ReferenceAttentionConfig, EvaluationConfig, BudgetConfig, PaddingConfig, trl.DPOConfig):
    """
    TRL's [`~trl.DPOConfig`] with padding removal.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Compute no padding: batches are packed at the decoder's door, on either padding side, with any attention
            implementation and with the numbers of the padded computation. What cannot be packed exactly is refused.
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Compute token prefixes that rows of a batch have in common only once: the prompt of a pair, a system prompt
            of many. A batch in which that would cost more than it saves is computed without. 'auto': where it is
            possible and pays, and log how often that is. Needs `padding_free`.
        padding_side (`str`, *optional*):
            Side on which the collator pads. By default the tokenizer's `padding_side`.
        parity_check (`bool` or `"forward"`, *optional*, defaults to `True`):
            With `padding_free`: compare packed with padded on a few rows of the first training and the first
            evaluation batch, and stop if they differ: log-probabilities, and in training their gradient. 'forward':
            without the gradient, which costs backward passes on up to four rows of 192 tokens (more with scans).
        stop_on_nonfinite (`bool`, *optional*, defaults to `False`):
            Stop the run at a loss or a gradient that is NaN or infinite. By default it is reported, with the step and
            the rows, and the run goes on, as in TRL.
        cp_attention (`str`, *optional*, defaults to `"heads"`):
            With `padding_free` and accelerate's `cp_size`: how several processes attend over one packed row. 'heads':
            tokens are exchanged for heads; takes as many heads as processes. 'keys': keys and values are gathered.
        attn_implementation (`str` or `dict[str, str]`, *optional*):
            Attention implementation of the model: a name, `"auto"` for the fastest that is installed here, or for a
            vision model a name for each part. By default transformers' choice.
        ref_attn_implementation (`str` or `dict[str, str]`, *optional*):
            Attention implementation of the reference model, as `attn_implementation` is the policy's: a name, 'auto',
            or for a vision model a name for each part, such as '{"text_config": "sdpa", "vision_config": "eager"}'. By
            default the policy's.
        predict_with_generate (`bool`, *optional*, defaults to `False`):
            Continue the prompts of the evaluation set during evaluation. `compute_metrics` then receives the generated
            tokens (`predictions`, padded with the pad token) and those of the data (`label_ids`, padded with -100), as
            `Seq2SeqTrainer` hands them over; the texts go to `generations/` in the output directory, and a few of them
            to the log and the trackers.
        generation_max_new_tokens (`int`, *optional*, defaults to `256`):
            With `predict_with_generate`: tokens to generate after a prompt, at most.
        generation_kwargs (`dict`, *optional*):
            With `predict_with_generate`: more keyword arguments of `generate`. They go before the model's own
            generation config: `{'do_sample': False}` for greedy decoding whatever it says.
        eval_generation_samples (`int`, *optional*):
            With `predict_with_generate`: how many rows of each evaluation set to generate from, the first ones. By
            default all.
        generation_rows_shown (`int`, *optional*, defaults to `2`):
            With `predict_with_generate`: how many of the generated texts an evaluation shows in the log and the
            trackers; 0 for none. All of them are in `generations/`.
        max_tokens_per_batch (`int`, *optional*):
            Most tokens that one forward computes on a device: the rows of an optimizer step are split into
            micro-batches of as many as fit, of even work on all processes, and the loss is the mean over all of them.
            The batch of an optimizer step stays `per_device_train_batch_size` x `gradient_accumulation_steps` x
            processes: the first is multiplied with the second, which becomes 1. With `prefix_sharing` a prefix that
            several micro-batches have in common is computed once in the step. Batches of evaluation are split, too,
            but not with images. Needs `padding_free`.
        group_by_prefix (`bool`, *optional*, defaults to `False`):
            Bring rows with long common prefixes into the same optimizer step and forward: several pairs of a prompt,
            the turns of a conversation, rollouts of a task. Which groups meet is drawn anew in every epoch, by the
            seed. Needs `prefix_sharing`.
        group_by_prefix_buffer (`int`, *optional*):
            With `group_by_prefix` and a streamed dataset: how many rows are read ahead and grouped among themselves.
            Several optimizer steps of rows at least.
        exact_eval_means (`bool`, *optional*, defaults to `False`):
            Average loss and metrics of an evaluation over all its pairs (DPO) or trained tokens (SFT), whatever the
            batch size. By default they are TRL's means over batches.
        **kwargs:
            All fields of [`~trl.DPOConfig`].

    Raises:
        ValueError: For another `padding_side`, for `prefix_sharing` or `max_tokens_per_batch` without `padding_free`,
            and for `generation_kwargs` that `generate` would refuse.

    Example:

    ```python
    >>> args = DPOConfig("runs/dpo", padding_free=True, prefix_sharing=True, use_cpu=True, bf16=False)

    ```
    """

    _VALID_DICT_FIELDS = [*trl.DPOConfig._VALID_DICT_FIELDS, "generation_kwargs"]


@help_from_docstring
@dataclass
class RewardConfig(AttentionConfig, BudgetConfig, PaddingConfig, trl.RewardConfig):
    """
    TRL's [`~trl.RewardConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, padding_side, parity_check, stop_on_nonfinite, attn_implementation,
        max_tokens_per_batch, group_by_prefix, group_by_prefix_buffer:
            As in [`DPOConfig`].
        pool_last_token (`bool`, *optional*, defaults to `False`):
            With `padding_free`: score the last token of each row's attention mask. By default the token that the
            padded computation scores: the last one which is not the pad token, another one where a row ends in the pad
            token itself (`pad_token == eos_token`).
        **kwargs:
            All fields of [`~trl.RewardConfig`].

    Raises:
        ValueError: For another `padding_side`, for `prefix_sharing` and for `pool_last_token` without `padding_free`.

    Example:

    ```python
    >>> args = RewardConfig("runs/reward", padding_free=True, pool_last_token=True, use_cpu=True, bf16=False)

    ```
    """

    pool_last_token: bool = False

    def __post_init__(self, attn_implementation: Implementation | None) -> None:
        if self.pool_last_token and not self.padding_free:
            raise ValueError("`pool_last_token=True` needs `padding_free=True`: a padded model pools by token ids.")
        super().__post_init__(attn_implementation)


@help_from_docstring
@dataclass
class KTOConfig(ReferenceAttentionConfig, BudgetConfig, PaddingConfig, trl.KTOConfig):
    """
    TRL's [`~trl.KTOConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, padding_side, parity_check, stop_on_nonfinite, attn_implementation,
        ref_attn_implementation, max_tokens_per_batch, group_by_prefix, group_by_prefix_buffer:
            As in [`DPOConfig`]. With a budget the KL term of a step is estimated from all its rows.
        **kwargs:
            All fields of [`~trl.KTOConfig`].

    Raises:
        ValueError: For another `padding_side`, and for `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> args = KTOConfig("runs/kto", padding_free=True, prefix_sharing="auto", use_cpu=True, bf16=False)

    ```
    """


@help_from_docstring
@dataclass
class GRPOConfig(ReferenceAttentionConfig, OnlineBudgetConfig, PackingConfig, trl.GRPOConfig):
    """
    TRL's [`~trl.GRPOConfig`] with padding removal.

    There is no `padding_side`: prompts are padded left and completions right, as generation leaves them.

    Args:
        padding_free, prefix_sharing, parity_check, stop_on_nonfinite, attn_implementation, ref_attn_implementation:
            As in [`DPOConfig`]. Padding is removed where log-probabilities are taken; with `prefix_sharing` the prompt
            of a group is computed once for all its completions.
        max_tokens_per_batch (`int`, *optional*):
            Most tokens of a forward that takes log-probabilities, of the policy and of the reference: batches are
            computed in pieces of as many rows as fit, with `prefix_sharing` a prompt once for all pieces. The
            rows and the loss of an optimizer step stay; `per_device_train_batch_size` is multiplied with
            `gradient_accumulation_steps`, which becomes 1, where the steps of a generation are whole optimizer steps
            and `generation_batch_size` is not given. Needs `padding_free`.
        **kwargs:
            All fields of [`~trl.GRPOConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> args = GRPOConfig("runs/grpo", padding_free=True, prefix_sharing=True, use_cpu=True, bf16=False)

    ```
    """


@help_from_docstring
@dataclass
class RLOOConfig(ReferenceAttentionConfig, OnlineBudgetConfig, PackingConfig, trl.RLOOConfig):
    """
    TRL's [`~trl.RLOOConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, parity_check, stop_on_nonfinite, attn_implementation, ref_attn_implementation,
        max_tokens_per_batch:
            As in [`GRPOConfig`].
        **kwargs:
            All fields of [`~trl.RLOOConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> args = RLOOConfig("runs/rloo", padding_free=True, prefix_sharing=True, use_cpu=True, bf16=False)

    ```
    """


@help_from_docstring
@dataclass
class SFTConfig(AttentionConfig, EvaluationConfig, BudgetConfig, PaddingConfig, trl.SFTConfig):
    """
    TRL's [`~trl.SFTConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, padding_side, parity_check, stop_on_nonfinite, attn_implementation,
        max_tokens_per_batch, group_by_prefix, group_by_prefix_buffer, exact_eval_means, predict_with_generate,
        generation_max_new_tokens, generation_kwargs, eval_generation_samples, generation_rows_shown:
            As in [`DPOConfig`].
        expand_turns (`bool`, *optional*, defaults to `False`):
            Make one row of each turn of the assistant in `messages`, as the chat template renders it then, trained on
            that turn, as the function `expand_turns` does. For templates that drop earlier thinking, and for agents'
            rollouts.
        **kwargs:
            All fields of [`~trl.SFTConfig`].

    Raises:
        ValueError: As [`DPOConfig`], and for `expand_turns` with `assistant_only_loss` or without
            `completion_only_loss`.

    Example:

    ```python
    >>> args = SFTConfig("runs/sft", padding_free=True, expand_turns=True, use_cpu=True, bf16=False)

    ```
    """

    expand_turns: bool = False

    _VALID_DICT_FIELDS = [*trl.SFTConfig._VALID_DICT_FIELDS, "generation_kwargs"]

    def __post_init__(self, attn_implementation: Implementation | None) -> None:
        check_turn_settings(self)
        super().__post_init__(attn_implementation)
