"""Whether the tokens of a decoder see later ones, found out by running it on a few."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .call.layers import takes_any_argument
from .generation import evaluating
from .model.sharded import gathers_in_parts


__all__ = ["change_of_earlier_states"]

logger = logging.getLogger(__name__)

TOKENS = 4


def change_of_earlier_states(decoder: Any) -> float:
    """
    How much the states of a few tokens change when the token after them is another one.

    One forward of two rows that differ in their last token, in evaluation mode, without gradients and with the random
    state left as it is.

    Returns:
        `float`: the largest change, relative to the largest one of the last token's own state; 0 if it is no more than
        rounding, as in a causal decoder, and where the decoder cannot be run: its weights are not here (on the meta
        device, offloaded, or in shards of several processes), or it takes more than token ids.
    """
    if not _is_here(decoder):
        return 0.0
    device = next(decoder.parameters()).device
    try:
        rows = decoder.get_input_embeddings().weight.shape[0]
        ids = (rows // 2 + torch.arange(TOKENS, device=device).repeat(2, 1)) % rows
        ids[1, -1] = (ids[0, -1] + 1) % rows
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False, "return_dict": True}
        parameters = inspect.signature(decoder.forward).parameters
        if not takes_any_argument(decoder):
            given = {k: v for k, v in given.items() if k in parameters}
        if "is_decoder" in parameters:  # BLIP's, whose model says so in every call
            given["is_decoder"] = decoder.config.is_decoder
        devices = [device] if device.type == "cuda" else []
        with torch.no_grad(), evaluating(decoder), torch.random.fork_rng(devices):
            states = decoder(**given)[0]
    except Exception as error:
        logger.info(f"Whether {type(decoder).__name__} is causal was not tried ({type(error).__name__}: {error}).")
        return 0.0
    if states.shape[:2] != ids.shape:
        return 0.0
    change = (states[0] - states[1]).abs().float().flatten(1).amax(1)
    relative = (change[:-1].max() / change[-1]).item()
    # What is masked has no weight at all, so causal decoders change by nothing, or by the order of some sum.
    return relative if relative > min(64 * torch.finfo(states.dtype).eps, 0.02) else 0.0


def _is_here(decoder: nn.Module) -> bool:
    """Whether all weights of a decoder are whole and on one device of this process."""
    parameters = list(decoder.parameters())
    whole = not any(p.is_meta or isinstance(p, DTensor) for p in parameters) and not gathers_in_parts(decoder)
    return whole and len({p.device for p in parameters}) == 1
