"""TRL's configurations with our fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trl

from .collators import check_padding_side


__all__ = ["DPOConfig", "GRPOConfig", "KTOConfig", "RLOOConfig", "RewardConfig", "SFTConfig"]


@dataclass
class PackingConfig:
    """Fields that every configuration of this package adds to TRL's; a mixin, in front of TRL's class."""

    padding_free: bool = field(
        default=False,
        metadata={
            "help": "Compute no padding: batches are packed at the decoder's door, on either padding side, with any "
            "attention implementation and with the numbers of the padded computation. What cannot be packed exactly "
            "is refused."
        },
    )
    prefix_sharing: bool = field(
        default=False,
        metadata={
            "help": "Compute token prefixes that rows of a batch have in common only once: the prompt of a pair, a "
            "system prompt of many. Needs `padding_free`."
        },
    )
    parity_check: bool = field(
        default=True,
        metadata={
            "help": "With `padding_free`: compare the packed forward with the padded one on a few rows of the first "
            "training and the first evaluation batch, and stop if they differ."
        },
    )

    def __post_init__(self) -> None:
        if self.prefix_sharing and not self.padding_free:
            raise ValueError(
                "`prefix_sharing=True` needs `padding_free=True`: prefixes are shared in the packed row, and without "
                "it there is none. Set both, or neither."
            )
        super().__post_init__()  # type: ignore[misc]


@dataclass
class PaddingConfig(PackingConfig):
    """The same, for trainers with a collator."""

    padding_side: str | None = field(
        default=None,
        metadata={
            "help": "Side on which the collator pads. By default the tokenizer's `padding_side`.",
            "choices": ["left", "right"],
        },
    )

    def __post_init__(self) -> None:
        check_padding_side(self.padding_side, optional=True)
        super().__post_init__()


@dataclass
class BudgetConfig(PaddingConfig):
    """The same, for trainers that split the batch of an optimizer step by tokens."""

    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens that one forward computes on a device: the rows of an optimizer step are split into "
            "micro-batches of as many as fit, of even work on all processes, and the loss is the mean over all of "
            "them. The batch of an optimizer step stays `per_device_train_batch_size` x "
            "`gradient_accumulation_steps` x processes. Needs `padding_free`."
        },
    )

    def __post_init__(self) -> None:
        check_budget(self)
        if self.max_tokens_per_batch is not None:
            # One batch of the data loader is one optimizer step, and the budget says in how many pieces.
            self.per_device_train_batch_size *= self.gradient_accumulation_steps
            self.gradient_accumulation_steps = 1
        super().__post_init__()


def check_budget(config: Any) -> None:
    """
    Raises:
        ValueError: If `max_tokens_per_batch` is no number of tokens, is less than one row may have, or is set without
            `padding_free` or with `packing`.
    """
    budget = getattr(config, "max_tokens_per_batch", None)
    if budget is None:
        return
    if not isinstance(budget, int) or budget < 1:
        raise ValueError(f"`max_tokens_per_batch` must be a number of tokens, got {budget!r}.")
    if not config.padding_free:
        raise ValueError(
            f"`max_tokens_per_batch={budget}` needs `padding_free=True`: it counts the tokens that are computed, and "
            "a padded batch computes others."
        )
    if getattr(config, "packing", False):
        raise ValueError(
            "`packing=True` makes rows of `max_length` tokens, and there is nothing left to split by tokens. Set one "
            "of `packing` and `max_tokens_per_batch`."
        )
    if config.max_length is not None and config.max_length > budget:
        raise ValueError(
            f"A row may have `max_length={config.max_length}` tokens, more than `max_tokens_per_batch={budget}`, and "
            f"no batch could hold it. Raise the budget to {config.max_length} at least, or lower `max_length`."
        )


@dataclass
class DPOConfig(BudgetConfig, trl.DPOConfig):
    """
    TRL's [`~trl.DPOConfig`] with padding removal.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to compute no padding.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute prefixes that rows have in common only once. Needs `padding_free`.
        padding_side (`str`, *optional*):
            `"left"` or `"right"`; by default the tokenizer's.
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether to compare packed with padded on the first batch of training and of evaluation.
        max_tokens_per_batch (`int`, *optional*):
            Most tokens of a forward on one device; by default a batch is not split. `per_device_train_batch_size` is
            then multiplied with `gradient_accumulation_steps`, which becomes 1: the budget says in how many forwards
            the pairs of an optimizer step are computed.
        **kwargs:
            All fields of [`~trl.DPOConfig`].

    Raises:
        ValueError: For another `padding_side`, for `prefix_sharing` or `max_tokens_per_batch` without `padding_free`,
            and for a budget that a row of `max_length` exceeds.
    """


@dataclass
class RewardConfig(PaddingConfig, trl.RewardConfig):
    """
    TRL's [`~trl.RewardConfig`] with padding removal.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to compute no padding.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute prefixes that rows have in common only once. Needs `padding_free`.
        padding_side (`str`, *optional*):
            `"left"` or `"right"`; by default the tokenizer's.
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether to compare packed with padded on the first batch of training and of evaluation.
        **kwargs:
            All fields of [`~trl.RewardConfig`].

    Raises:
        ValueError: For another `padding_side`, and for `prefix_sharing` without `padding_free`.
    """


@dataclass
class KTOConfig(PaddingConfig, trl.KTOConfig):
    """
    TRL's [`~trl.KTOConfig`] with padding removal.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to compute no padding.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute prefixes that rows have in common only once. Needs `padding_free`.
        padding_side (`str`, *optional*):
            `"left"` or `"right"`; by default the tokenizer's.
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether to compare packed with padded on the first batch of training and of evaluation.
        **kwargs:
            All fields of [`~trl.KTOConfig`].

    Raises:
        ValueError: For another `padding_side`, and for `prefix_sharing` without `padding_free`.
    """


@dataclass
class GRPOConfig(PackingConfig, trl.GRPOConfig):
    """
    TRL's [`~trl.GRPOConfig`] with padding removal.

    There is no `padding_side`: prompts are padded left and completions right, as generation leaves them.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to compute no padding where log-probabilities are taken.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute the prompt of a group once for all its completions. Needs `padding_free`.
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether to compare packed with padded on the first batch of training and of evaluation.
        **kwargs:
            All fields of [`~trl.GRPOConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.
    """


@dataclass
class RLOOConfig(PackingConfig, trl.RLOOConfig):
    """
    TRL's [`~trl.RLOOConfig`] with padding removal.

    There is no `padding_side`: prompts are padded left and completions right, as generation leaves them.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to compute no padding where log-probabilities are taken.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute the prompt of a group once for all its completions. Needs `padding_free`.
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether to compare packed with padded on the first batch of training and of evaluation.
        **kwargs:
            All fields of [`~trl.RLOOConfig`].

    Raises:
        ValueError: For `prefix_sharing` without `padding_free`.
    """


@dataclass
class SFTConfig(BudgetConfig, trl.SFTConfig):
    """
    TRL's [`~trl.SFTConfig`] with padding removal.

    Args:
        padding_free (`bool`, *optional*, defaults to `False`):
            Whether to compute no padding.
        prefix_sharing (`bool`, *optional*, defaults to `False`):
            Whether to compute prefixes that rows have in common only once. Needs `padding_free`.
        padding_side (`str`, *optional*):
            `"left"` or `"right"`; by default the tokenizer's.
        parity_check (`bool`, *optional*, defaults to `True`):
            Whether to compare packed with padded on the first batch of training and of evaluation.
        max_tokens_per_batch (`int`, *optional*):
            Most tokens of a forward on one device; by default a batch is not split. `per_device_train_batch_size` is
            then multiplied with `gradient_accumulation_steps`, which becomes 1: the budget says in how many forwards
            the rows of an optimizer step are computed.
        **kwargs:
            All fields of [`~trl.SFTConfig`].

    Raises:
        ValueError: For another `padding_side`, for `prefix_sharing` or `max_tokens_per_batch` without `padding_free`,
            and for a budget that a row of `max_length` exceeds.
    """
