"""
Rows with images that several processes compute together, against the padded forward of one process.

[`main`] prints a line of JSON for each family and batch: the largest difference of a logit and of a gradient
(the mean over processes, relative to the parameter's or to 1 % of the largest one), and the tokens that entered.
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from kit.observe import entered_tokens
from kit.split_runs import average, break_it, difference, take_gradients, tell
from torch import nn
from zoo.vision_families import Row, build_vision, collate

from trl_padfix import remove_padding, split_rows


__all__: list[str] = []

BATCHES = {
    "long": [Row((5, 6, -1, 7, 8, 9, 10, 11, 12, 13)), Row((5, 6, -1, 7, 14)), Row((15, -2, 16))],
    "even": [Row((5, -1, 6, 7)), Row((8, -2, 9, 10))],  # whole rows
    "text": [Row((5, 6, 7, 8)), Row((5, 6, 9))],
}


def step(model: nn.Module, call: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of real tokens and the gradients of their loss."""
    logits = model(**call, use_cache=False).logits[call["attention_mask"].bool()]
    (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), take_gradients(model)


def differences(family: str, kind: str) -> dict[str, Any]:
    vision = build_vision(family)
    call = collate(vision, BATCHES[kind], "mixed").call()
    want, expected = step(vision.model, call)
    with remove_padding(vision.model, prefix_sharing=True) as handle:
        split_rows(handle)
        entered = entered_tokens(handle.decoder)
        got, found = step(vision.model, call)
        packed, padded = handle.stats.packed_tokens, handle.stats.padded_forwards
    average(found)
    return {
        "logits": float((got - want).abs().max()),
        "gradients": difference(found, expected),
        "entered": entered[0],
        "packed": packed,
        "padded": padded,
    }


def main(*families: str) -> None:
    dist.init_process_group("gloo")
    break_it(os.environ.get("BROKEN", ""))
    for family, kind in product(families, BATCHES):
        tell({"case": [family, kind]} | differences(family, kind), "entered")
