"""
The load-balancing loss of experts, over all pieces of a forward that was split.

It is no mean over tokens: the share of tokens that an expert gets is multiplied by its mean probability, both taken
over the whole forward. So the pieces hand over their router logits, and the loss is taken of all of them at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils as trl_utils
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from ..core.find import find_decoder


__all__ = ["Routed", "balancing_loss", "check_balancing_loss", "joins_balancing_losses", "routed_of"]

Routed = tuple[torch.Tensor, ...] | None
"""Router logits of a forward, layer by layer, `(B * L, experts)` each."""


def joins_balancing_losses() -> bool:
    """Whether TRL takes the loss apart from that of the language model, which it does with its fused LM head."""
    return hasattr(trl_utils, "add_fused_lm_head")


@contextmanager
def routed_of(model: PreTrainedModel) -> Iterator[list[Routed]]:
    """A list that grows by the router logits of each call of the model's decoder within the block."""
    found: list[Routed] = []

    def keep(decoder: Any, args: Any, output: Any) -> None:
        found.append(getattr(output, "router_logits", None))

    hook = find_decoder(model).register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


def balancing_loss(model: PreTrainedModel, routed: Sequence[Routed], masks: Sequence[torch.Tensor | None]) -> Any:
    """
    The loss of all pieces, as transformers takes it of one forward.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model with experts.
        routed (`Sequence[tuple[torch.Tensor, ...]]`):
            Router logits of the pieces.
        masks (`Sequence[torch.Tensor]`):
            Their attention masks, of shape `(b, L)`; `None` for pieces without padding.
    """
    layers = tuple(map(torch.cat, zip(*(piece for piece in routed if piece is not None), strict=True)))
    mask = None if any(m is None for m in masks) else torch.cat([m for m in masks if m is not None])
    loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    loss = loss or modeling_mixtral.load_balancing_loss_func
    return loss(layers, layers[0].shape[-1], model.config.get_text_config().num_experts_per_tok, mask)


@torch.no_grad()
def check_balancing_loss(model: PreTrainedModel, routed: Routed, mask: torch.Tensor | None, own: torch.Tensor) -> None:
    """
    Raises:
        ValueError: If the loss of a piece is not the model's own.
    """
    found = balancing_loss(model, [routed], [mask]) if routed else own.new_tensor(float("nan"))
    if not torch.allclose(found.to(own.dtype), own, rtol=1e-3):
        raise ValueError(
            f"The load-balancing loss of {type(model).__name__} is {own.item():.6f} for the first rows of the batch, "
            f"and {found.item():.6f} by their router logits: `max_tokens_per_batch` cannot put it together from "
            "pieces. Leave the budget out, or set `router_aux_loss_coef=0`."
        )
