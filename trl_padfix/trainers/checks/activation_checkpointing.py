"""The arguments of activation checkpointing in a configuration, under either of their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import TrainingArguments


__all__ = ["checkpointing_kwargs"]


def checkpointing_kwargs(config: TrainingArguments | None) -> dict[str, Any] | None:
    """`activation_checkpointing_kwargs`, or `gradient_checkpointing_kwargs`, its older name; `None` if it is off."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if (is_on := getattr(config, name, None)) is not None:
            return dict(getattr(config, f"{name}_kwargs", None) or {}) if is_on else None
    return None
