"""Fields that say which rows meet in an optimizer step, and in how many pieces it is computed."""

from dataclasses import dataclass
from typing import Any


__all__ = ["BudgetConfig", "OnlineBudgetConfig", "check_grouping", "check_token_budget"]


@dataclass
class OnlineBudgetConfig:
    """`max_tokens_per_batch`; a mixin, in front of the others."""

    max_tokens_per_batch: int | None = None

    def __post_init__(self) -> None:
        check_token_budget(self)
        accumulated: int = self.gradient_accumulation_steps  # type: ignore[has-type]
        # A row weighs what it weighs in TRL's micro-batches, of which the last one of an epoch may have fewer rows.
        self._rows_per_micro_batch = self.per_device_train_batch_size  # type: ignore[attr-defined]
        steps = getattr(self, "steps_per_generation", None)
        whole = (steps is None or steps % accumulated == 0) and getattr(self, "generation_batch_size", None) is None
        if self.max_tokens_per_batch is not None and whole:
            # One batch of the data loader is one optimizer step, and the budget says in how many pieces.
            self.per_device_train_batch_size *= accumulated  # type: ignore[attr-defined]
            self.gradient_accumulation_steps = 1
            if steps is not None:
                self.steps_per_generation = steps // accumulated
        super().__post_init__()  # type: ignore[misc]


@dataclass
class BudgetConfig(OnlineBudgetConfig):
    """`max_tokens_per_batch` and `group_by_prefix`, for trainers whose rows are those of a dataset."""

    group_by_prefix: bool = False
    group_by_prefix_buffer: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_grouping(self)


def check_token_budget(config: Any) -> None:
    """
    Raises:
        ValueError: If `max_tokens_per_batch` is no number of tokens, is less than a completion may have that is yet to
            be generated, or is set without `padding_free` or with `packing`.
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
    longest = getattr(config, "max_completion_length", None)  # rows of a dataset are compared when they are there
    if longest is not None and longest > budget:
        raise ValueError(
            f"A row may have `max_completion_length={longest}` tokens, more than `max_tokens_per_batch={budget}`, and "
            f"no batch could hold it. Raise the budget to {longest} at least, or lower `max_completion_length`."
        )


def check_grouping(config: Any) -> None:
    """
    Raises:
        ValueError: If `group_by_prefix` is set without `prefix_sharing`, or with something else that orders rows, and
            if its buffer is no number of rows or is set without it.
    """
    grouped, buffer = getattr(config, "group_by_prefix", False), getattr(config, "group_by_prefix_buffer", None)
    if buffer is not None and (isinstance(buffer, bool) or not isinstance(buffer, int) or buffer < 1 or not grouped):
        raise ValueError(
            f"`group_by_prefix_buffer={buffer!r}` is the number of rows of a stream that `group_by_prefix` groups at "
            "a time. Give a number with `group_by_prefix=True`, or leave it out."
        )
    if not grouped:
        return
    if not getattr(config, "prefix_sharing", False):
        raise ValueError(
            "`group_by_prefix=True` needs `prefix_sharing=True`: without it the prefixes of the rows that it brings "
            "together are computed for each of them. Set both, or neither."
        )
    if getattr(config, "packing", False):
        raise ValueError(
            "`packing=True` puts rows behind one another before they are sampled, and packed rows share no prefix. "
            "Set one of `packing` and `group_by_prefix`."
        )
    strategy = getattr(config, "train_sampling_strategy", "random")
    strategy = "group_by_length" if getattr(config, "group_by_length", False) is True else strategy
    if strategy not in ("random", "sequential"):
        raise ValueError(
            f"`group_by_prefix=True` and `{strategy}` both say which rows meet in a step, by prefix and by length. "
            "Set one of them: with `max_tokens_per_batch` lengths are balanced anyway."
        )
