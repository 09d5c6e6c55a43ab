"""
TRL's configurations with our fields.

Each field is documented once, in the docstring of the first configuration that has it. `--help` and `docs/options.md`
are generated from these docstrings; to keep `--help` fast, checks import what they need only when they run.
"""

# No `from __future__ import annotations`: until Python 3.10 `get_type_hints`, which TRL's parser calls, takes an
# `InitVar` only where it is not a string.
from dataclasses import dataclass

import trl

from .field_types import configuration
from .settings import (
    AttentionConfig,
    BudgetConfig,
    EvaluationConfig,
    ForwardBudgetConfig,
    PackingConfig,
    PaddingConfig,
    ReferenceAttentionConfig,
)


__all__ = ["DPOConfig", "GRPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"]


@configuration
@dataclass
class DPOConfig(ReferenceAttentionConfig, EvaluationConfig, BudgetConfig, PaddingConfig, trl.DPOConfig):
    """
    TRL's [`~trl.DPOConfig`] with padding removal.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Skip padding: the decoder receives one row of real tokens. Loss and gradients stay the same, up to
            rounding. Works with streaming, images and any collator. A model that cannot be packed raises an error.
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Compute the shared beginning of rows once, for example the prompt of a pair. `True` and `'auto'` share if
            this saves at least about 1 in 64 tokens of a batch. Where
            something prevents sharing, such as NEFTune, only `True` warns (`strict`: stops). Prefer `'auto'`. Needs
            `padding_free`.
        padding_side (`str`, *optional*):
            Side on which the collator pads. Default: the tokenizer's side, but `'right'` for recurrent models,
            prompt tuning and p-tuning.
        parity_check (`bool`, *optional*, defaults to `True`):
            Compare a few rows with and without padding in the first steps. If the model's packed results are wrong,
            the run stops. If only your loss reads padding, it warns and continues padded. Disable it to measure
            time, or if your loss must not be called more than once a step.
        strict (`bool`, *optional*, defaults to `False`):
            Raise an error if a forward cannot be packed, or if the loss depends on padding. By default such forwards
            run padded, with a warning.
        packed_multiple_of (`int` or `list[int]`, *optional*):
            Round the length of packed rows up: to a multiple of an int, or to the next length in a list. Losses and
            metrics ignore the filler. Needs `padding_free`.
        attn_implementation (`str` or `dict[str, str]`, *optional*):
            Attention implementation: a name, or `'auto'` (an installed FlashAttention, else `sdpa`, else `eager`);
            for a vision model, also a name for each part. Defaults to transformers' choice.
        ref_attn_implementation (`str` or `dict[str, str]`, *optional*):
            Like `attn_implementation`, but for the reference model. Defaults to the policy's.
        predict_with_generate (`bool`, *optional*, defaults to `False`):
            In evaluation, generate completions, and write them to `generations/` in the output directory. As in
            `Seq2SeqTrainer`, `compute_metrics` gets the generated tokens as `predictions`, and the tokens of the data
            as `label_ids`, padded with -100.
        generation_max_new_tokens (`int`, *optional*, defaults to `256`):
            Maximum number of tokens that `predict_with_generate` generates. Set other options in the model's
            `generation_config`.
        max_tokens_per_batch (`int`, *optional*):
            Token budget: split each batch into sub-batches of at most this many computed tokens, which run one after
            another. Loss and metrics stay the same. Needs `padding_free`.
        group_by_prefix (`bool`, *optional*, defaults to `False`):
            Put rows with long shared prefixes into the same batch, for example the turns of a conversation. Needs
            `prefix_sharing`. Raises an error with streaming, images, `packing` and `group_by_length`.
        **kwargs:
            All fields of [`~trl.DPOConfig`].

    Raises:
        ValueError: For an invalid `padding_side`, for `prefix_sharing` or `max_tokens_per_batch` without
        `padding_free`.

    Example:

    ```python
    >>> from trl_padfix import DPOConfig

    >>> args = DPOConfig("runs/dpo", padding_free=True, prefix_sharing="auto", use_cpu=True, bf16=False)

    ```
    """


@configuration
@dataclass
class RewardConfig(AttentionConfig, BudgetConfig, PaddingConfig, trl.RewardConfig):
    """
    TRL's [`~trl.RewardConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, padding_side, parity_check, strict, packed_multiple_of,
        attn_implementation, max_tokens_per_batch, group_by_prefix:
            As in [`DPOConfig`].
        pool_last_token (`bool`, *optional*, defaults to `False`):
            Score the last position where `attention_mask` is 1. By default the model scores the last token that is
            not the pad token. Enable it if the pad token also occurs in the text. Needs `padding_free`.
        **kwargs:
            All fields of [`~trl.RewardConfig`].

    Raises:
        ValueError: For an invalid `padding_side`, for `prefix_sharing` or `pool_last_token` without `padding_free`.

    Example:

    ```python
    >>> from trl_padfix import RewardConfig

    >>> args = RewardConfig("runs/reward", padding_free=True, pool_last_token=True, use_cpu=True, bf16=False)

    ```
    """

    pool_last_token: bool = False


@configuration
@dataclass
class KTOConfig(ReferenceAttentionConfig, BudgetConfig, PaddingConfig, trl.KTOConfig):
    """
    TRL's [`~trl.KTOConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, padding_side, parity_check, strict, packed_multiple_of,
        attn_implementation, ref_attn_implementation, max_tokens_per_batch, group_by_prefix:
            As in [`DPOConfig`].
        **kwargs:
            All fields of [`~trl.KTOConfig`].

    Raises:
        ValueError: For an invalid `padding_side`, and for `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> from trl_padfix import KTOConfig

    >>> args = KTOConfig("runs/kto", padding_free=True, prefix_sharing="auto", use_cpu=True, bf16=False)

    ```
    """


@configuration
@dataclass
class GRPOConfig(ReferenceAttentionConfig, ForwardBudgetConfig, PackingConfig, trl.GRPOConfig):
    """
    TRL's [`~trl.GRPOConfig`] with padding removal.

    There is no `padding_side`: prompts are padded left and completions right, as generation leaves them.

    Args:
        padding_free, prefix_sharing, parity_check, strict, packed_multiple_of,
        attn_implementation, ref_attn_implementation:
            As in [`DPOConfig`]. Padding is removed in the forwards for log-probabilities; with `prefix_sharing` the
            prompt of a group is computed once for all its completions.
        max_tokens_per_batch (`int`, *optional*):
            Token budget: splits the forwards for log-probabilities of policy and reference into sub-batches of at most
            this many computed tokens; with `prefix_sharing` a prompt is computed once for all of them. Rows, loss and
            accumulation are TRL's. Needs `padding_free`.
        **kwargs:
            All fields of [`~trl.GRPOConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> from trl_padfix import GRPOConfig

    >>> args = GRPOConfig("runs/grpo", padding_free=True, prefix_sharing="auto", use_cpu=True, bf16=False)

    ```
    """


@configuration
@dataclass
class RLOOConfig(ReferenceAttentionConfig, ForwardBudgetConfig, PackingConfig, trl.RLOOConfig):
    """
    TRL's [`~trl.RLOOConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, parity_check, strict, packed_multiple_of,
        attn_implementation, ref_attn_implementation, max_tokens_per_batch:
            As in [`GRPOConfig`].
        **kwargs:
            All fields of [`~trl.RLOOConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.

    Example:

    ```python
    >>> from trl_padfix import RLOOConfig

    >>> args = RLOOConfig("runs/rloo", padding_free=True, prefix_sharing="auto", use_cpu=True, bf16=False)

    ```
    """


@configuration
@dataclass
class SFTConfig(AttentionConfig, EvaluationConfig, BudgetConfig, PaddingConfig, trl.SFTConfig):
    """
    TRL's [`~trl.SFTConfig`] with padding removal.

    Args:
        padding_free, prefix_sharing, padding_side, parity_check, strict, packed_multiple_of,
        attn_implementation, max_tokens_per_batch, group_by_prefix, predict_with_generate, generation_max_new_tokens:
            As in [`DPOConfig`].
        expand_turns (`bool`, *optional*, defaults to `False`):
            Make one row for each assistant turn in `messages`, with the messages before it as the prompt. Use it for
            agent rollouts, and for templates that drop earlier thinking.
        **kwargs:
            All fields of [`~trl.SFTConfig`].

    Raises:
        ValueError: As [`DPOConfig`], and for `expand_turns` with `assistant_only_loss` or without
            `completion_only_loss`.

    Example:

    ```python
    >>> from trl_padfix import SFTConfig

    >>> args = SFTConfig("runs/sft", padding_free=True, expand_turns=True, use_cpu=True, bf16=False)

    ```
    """

    expand_turns: bool = False
