"""Observations of a model: the tokens that entered its decoder, and each row computed alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Qwen2Model

from trl_padfix.core.model.patching import patches_on
from trl_padfix.core.patches.decoder import DecoderPatch


CACHE = "cache" if "cache" in inspect.signature(Qwen2Model.forward).parameters else "past_key_values"
"""Name of the argument for a cache; the second until transformers 5.23."""


def has_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a decoder or a layer was called to continue cached tokens, as in generation."""
    return kwargs.get(CACHE) is not None


class StandIn(SimpleNamespace):
    """In place of a trainer. A part refers to its trainer weakly, so that a test has to keep it."""


class EnteredTokens(list[int]):
    """Tokens of each forward of a layer; as a context manager it stops counting at the end of the block."""

    def __init__(self, layer: nn.Module) -> None:
        self.hook = layer.register_forward_pre_hook(lambda _, args: self.append(args[0].shape[:-1].numel()))

    def __enter__(self) -> EnteredTokens:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hook.remove()


def entered_tokens(model: nn.Module) -> EnteredTokens:
    """
    Count the tokens that enter the first layer of a decoder, forward by forward: they show which mode ran.

    For a model with images, pass its decoder or its tower.
    """
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    entered = EnteredTokens(layers[0])
    accept_hooks(model)
    return entered


def accept_hooks(model: nn.Module) -> None:
    """Let calls stay packed although hooks that only count were registered after the attachment."""
    for module in model.modules():
        for patch in patches_on(module):
            if isinstance(patch, DecoderPatch):
                patch.attachment.accept_hooks()


def each_row_alone(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ids: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Results of `compute(ids, mask)` for the real tokens of each row in a batch of its own, concatenated."""
    rows = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    return torch.cat([compute(row, torch.ones_like(row)) for row in rows])
