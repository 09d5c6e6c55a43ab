"""
Models of sentence-transformers: a transformers model, followed by modules that pool its states.

They are recognized without an import of sentence-transformers, by the table of modalities of their first module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


__all__ = ["ENCODERS", "by_name", "pipeline_in", "scores_added_tokens"]

ENCODERS = (
    "sentence-transformers unpads encoders itself, with FlashAttention: "
    "`model_kwargs={'attn_implementation': 'flash_attention_2'}`"
)
"""Remedy in the refusal of encoders, whose tokens see later ones."""


def pipeline_in(model: nn.Module) -> nn.Sequential | None:
    """The pipeline of sentence-transformers in `model`: itself, or a module that a wrapper or a loss holds."""
    sequences = (m for m in model.modules() if isinstance(m, nn.Sequential) and len(m))
    return next((m for m in sequences if hasattr(m[0], "modality_config")), None)


def by_name(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model`, called with keyword arguments; a pipeline itself takes one dictionary."""
    if (pipeline := pipeline_in(model)) is None:
        return model
    # Chat models have no modality "text"; each modality of tokens calls the same forward.
    modality = next(iter(pipeline[0].modality_config))  # type: ignore[call-overload]
    return lambda **inputs: model({**inputs, "modality": modality})


def scores_added_tokens(model: nn.Module) -> bool:
    """Whether a pipeline scores the tokens that it appends to queries, outside of the attention mask."""
    pipeline = pipeline_in(model)
    expansion = getattr(pipeline[0], "query_expansion", None) if pipeline is not None else None
    return bool(expansion) and not expansion.get("attend")
