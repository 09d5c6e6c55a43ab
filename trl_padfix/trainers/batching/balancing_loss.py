"""The load-balancing loss of experts, from the router logits of all sub-batches of a forward."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from ...core.anatomy import find_decoder
from ...core.context import of_this_thread


__all__ = ["RouterLogits", "balancing_loss", "balancing_term", "check_balancing_loss", "record_router_logits"]

RouterLogits = tuple[torch.Tensor, ...] | None
"""Router logits of a forward, layer by layer, `(B * L, experts)` each."""


@contextmanager
def record_router_logits(model: PreTrainedModel) -> Iterator[list[RouterLogits]]:
    """A block in which the returned list collects the router logits of each call of the model's decoder."""
    recorded: list[RouterLogits] = []

    record = of_this_thread(lambda *call: recorded.append(getattr(call[-1], "router_logits", None)))
    with find_decoder(model).register_forward_hook(record):
        yield recorded


def balancing_loss(model: PreTrainedModel, routed: Sequence[tuple[RouterLogits, torch.Tensor | None]]) -> Any:
    """
    The load-balancing loss of all sub-batches, as transformers computes it for one forward.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model with experts.
        routed (`Sequence[tuple[tuple[torch.Tensor, ...], torch.Tensor]]`):
            Router logits of each sub-batch, and its attention mask of shape `(b, L)`; `None` without padding.
    """
    router_logits, masks = zip(*routed, strict=True)
    layers = tuple(map(torch.cat, zip(*(logits for logits in router_logits if logits is not None), strict=True)))
    mask = None if any(m is None for m in masks) else torch.cat([m for m in masks if m is not None])
    # Most models with experts have their own copy of the function; the others use Mixtral's.
    loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    loss = loss or modeling_mixtral.load_balancing_loss_func
    return loss(layers, layers[0].shape[-1], model.config.get_text_config().num_experts_per_tok, mask)


def balancing_term(model: PreTrainedModel, output: Mapping[str, Any]) -> torch.Tensor | float:
    """The term that the load-balancing loss of experts adds to the loss of an output."""
    if output.get("aux_loss") is None:
        return 0.0
    # Some models read the weight from their configuration only. TRL's head before 1.16, whose outputs count tokens,
    # does the same under transformers 5.
    weights = [getattr(x, "router_aux_loss_coef", None) for x in (model, model.config.get_text_config())]
    if output.get("num_correct_tokens") is not None and Version(transformers.__version__).major > 4:
        weights.reverse()
    return next((weight for weight in weights if weight is not None), 0.0) * output["aux_loss"]


@torch.no_grad()
def check_balancing_loss(
    model: PreTrainedModel, router_logits: RouterLogits, mask: torch.Tensor | None, expected: torch.Tensor
) -> None:
    """
    Raises:
        ValueError: If the loss of a sub-batch differs from `expected`, the loss that the model returned.
    """
    loss = balancing_loss(model, [(router_logits, mask)]) if router_logits else expected.new_tensor(float("nan"))
    if not torch.allclose(loss.to(expected.dtype), expected, rtol=1e-3):
        raise ValueError(
            f"The load-balancing loss of {type(model).__name__} is {expected.item():.6f} for the first rows of the "
            f"batch, but their router logits give {loss.item():.6f}: `max_tokens_per_batch` cannot compute it from "
            "sub-batches. Leave the budget out, or set `router_aux_loss_coef=0`."
        )
