"""TRL's configurations with our fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import trl

from .collators import check_padding_side
from .generation import check_generation_settings


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
class GeneratingConfig:
    """Fields of the configurations whose trainers can generate in evaluation; a mixin, in front of the others."""

    predict_with_generate: bool = field(
        default=False,
        metadata={
            "help": "Continue the prompts of the evaluation set during evaluation. `compute_metrics` then receives "
            "the generated tokens (`predictions`, padded with the pad token) and those of the data (`label_ids`, "
            "padded with -100), as `Seq2SeqTrainer` hands them over; the texts go to `generations/` in the output "
            "directory, and a few of them to the log and the trackers."
        },
    )
    generation_max_new_tokens: int = field(
        default=256, metadata={"help": "With `predict_with_generate`: tokens to generate after a prompt, at most."}
    )
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "With `predict_with_generate`: more keyword arguments of `generate`. They go before the model's "
            "own generation config: `{'do_sample': False}` for greedy decoding whatever it says."
        },
    )
    eval_generation_samples: int | None = field(
        default=None,
        metadata={
            "help": "With `predict_with_generate`: how many rows of each evaluation set to generate from, the first "
            "ones. By default all."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.predict_with_generate:
            check_generation_settings(self)


@dataclass
class DPOConfig(GeneratingConfig, PaddingConfig, trl.DPOConfig):
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
        predict_with_generate (`bool`, *optional*, defaults to `False`):
            Whether to continue the prompts of the evaluation set during evaluation.
        generation_max_new_tokens (`int`, *optional*, defaults to `256`):
            Tokens to generate after a prompt, at most.
        generation_kwargs (`dict`, *optional*):
            More keyword arguments of `generate`; they go before the model's own generation config.
        eval_generation_samples (`int`, *optional*):
            Rows of each evaluation set to generate from, the first ones; by default all.
        **kwargs:
            All fields of [`~trl.DPOConfig`].

    Raises:
        ValueError: For another `padding_side`, for `prefix_sharing` without `padding_free`, and for
            `generation_kwargs` that `generate` would refuse.
    """

    _VALID_DICT_FIELDS = [*trl.DPOConfig._VALID_DICT_FIELDS, "generation_kwargs"]


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
class SFTConfig(GeneratingConfig, PaddingConfig, trl.SFTConfig):
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
        predict_with_generate (`bool`, *optional*, defaults to `False`):
            Whether to continue the prompts of the evaluation set during evaluation.
        generation_max_new_tokens (`int`, *optional*, defaults to `256`):
            Tokens to generate after a prompt, at most.
        generation_kwargs (`dict`, *optional*):
            More keyword arguments of `generate`; they go before the model's own generation config.
        eval_generation_samples (`int`, *optional*):
            Rows of each evaluation set to generate from, the first ones; by default all.
        **kwargs:
            All fields of [`~trl.SFTConfig`].

    Raises:
        ValueError: For another `padding_side`, for `prefix_sharing` without `padding_free`, and for
            `generation_kwargs` that `generate` would refuse.
    """

    _VALID_DICT_FIELDS = [*trl.SFTConfig._VALID_DICT_FIELDS, "generation_kwargs"]
