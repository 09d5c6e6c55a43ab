"""Checks of the arguments of a trainer, before it loads a model or tokenizes data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger

from ...core.model.older import rope_parameters
from ...core.model.positions import length_dependent_ropes
from ...versions import newer_trl
from ..settings import Settings, check_settings


if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..task import Task


__all__ = ["check_arguments", "require_teacher", "rope_kind_beyond"]

logger = get_logger(__name__)


def check_arguments(
    config: TrainingArguments | None, settings: Settings, task: Task, init_kwargs: dict[str, Any]
) -> None:
    """
    Check the arguments of a trainer (`init_kwargs`, by name) and our fields of its configuration.

    The configuration checked its fields when it was created; `check_settings` is for fields that were set later.
    """
    if newer := newer_trl():
        logger.warning_once(newer)
    check_settings(settings, config)
    budget, is_sampled = settings.max_tokens_per_batch, init_kwargs.get("rollout_func") is None
    for name in ("max_completion_length", "max_new_tokens") if budget and is_sampled else ():
        if (longest := vars(config).get(name) or 0) > (budget or longest):
            raise ValueError(
                f"A completion may have `{name}={longest}` tokens, more than `max_tokens_per_batch={budget}`: it "
                f"would run alone. Raise the budget above {longest} plus the length of a prompt, or lower `{name}`."
            )
    side, collator = settings.padding_side, init_kwargs.get("data_collator")
    if side is not None and (not task.knows(collator) or getattr(collator, "padding_side", side) != side):
        raise ValueError(
            f"`padding_side={side!r}` is for the default collator, but `data_collator` is your own "
            f"`{type(collator).__name__}`, which chooses the side. Set the side there, and leave `padding_side` out."
        )


def require_teacher(init_kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` if a trainer of a student gets no teacher model."""
    if init_kwargs.get("teacher_model") is None:
        raise ValueError(
            "The student needs a teacher, and `teacher_model` is not given. Pass a model, or the id of one "
            "(`--teacher_model_name_or_path` on the command line)."
        )


def rope_kind_beyond(model: torch.nn.Module, max_length: int | None) -> str | None:
    """
    The kind of a rotary embedding whose frequencies depend on the longest row of a forward.

    `None` if the model has none, or if no row can be longer than the rows of its pretraining: up to that length the
    frequencies are constant.
    """
    for module, kind in length_dependent_ropes(model).items():
        limit = module.config.max_position_embeddings
        longest = rope_parameters(module.config).get("original_max_position_embeddings", limit)
        if max_length is None or max_length > longest:
            return kind
    return None
