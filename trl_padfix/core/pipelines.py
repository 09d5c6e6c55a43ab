"""
Models of sentence-transformers: a transformers model, followed by modules that pool its states.

They are recognised without an import of sentence-transformers, by the table of modalities of their first module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .generation import evaluating


__all__ = ["ENCODERS", "by_name", "padding_reader", "pipeline_in"]

logger = logging.getLogger(__name__)

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


def padding_reader(model: nn.Module) -> str | None:
    """
    The module of a pipeline whose result depends on the states of padding; `None` if there is none.

    A packed forward returns zeros there. Runs the modules after the transformer twice on states of two short rows, and
    leaves the random state as it is. A module that needs more than states and mask is not probed.
    """
    pipeline = pipeline_in(model)
    if pipeline is None or getattr(pipeline[0], "module_output_name", None) != "token_embeddings":
        return None
    try:
        weight = next(pipeline[0].parameters())
        devices = [weight.device] if weight.device.type == "cuda" else []
        with torch.no_grad(), evaluating(pipeline), torch.random.fork_rng(devices):
            return _first_difference(pipeline, weight)
    except Exception as error:
        logger.info(f"Whether modules read the states of padding was not probed ({type(error).__name__}: {error}).")
        return None


def _first_difference(pipeline: Any, weight: torch.Tensor) -> str | None:
    """The first module after which the values of real tokens, or of rows, depend on the states of padding."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], device=weight.device)
    if getattr(getattr(pipeline[0], "tokenizer", None), "padding_side", "right") == "left":
        mask = mask.flip(1)
    states = torch.randn(*mask.shape, pipeline[0].get_embedding_dimension(), device=weight.device, dtype=weight.dtype)
    features = [
        {"token_embeddings": values, "attention_mask": mask, "input_ids": mask, "modality": "text"}
        for values in (states, states * mask.unsqueeze(-1))  # what a padded and a packed forward return
    ]
    for module in list(pipeline)[1:]:  # a list, because a slice of a pipeline is a new pipeline
        features = [module(dict(values)) for values in features]
        if any(not torch.equal(a, b) for a, b in zip(*(_values(x, mask) for x in features), strict=True)):
            return type(module).__name__
    return None


def _values(features: dict[str, Any], mask: torch.Tensor) -> Iterator[torch.Tensor]:
    """The values of rows and of real tokens in the features of a pipeline."""
    for value in features.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value[mask.bool()] if value.shape[:2] == mask.shape else value
