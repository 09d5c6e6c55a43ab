"""The numbers of a model on a batch (log-probabilities and gradients) and how close two of them must be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kit.tolerance import assert_close, assert_gradients_close
from zoo.models import ROWS, SHAPE, padded_positions, real_logps

from conformance.arbiter import in_precision
from trl_padfix import Layout
from trl_padfix.core.layout.layout import SegmentLengths


SHARING = pytest.mark.parametrize("sharing", [False, True], ids=["padding_free", "prefix_sharing"])
SIDES = ("left", "right", "holes")
REAL = sum(map(len, ROWS))
DISTINCT = len({tuple(row[: n + 1]) for row in ROWS for n in range(len(row))})


def checkpointed(model: torch.nn.Module, reentrant: bool) -> torch.nn.Module:
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def weighted_sum(logps: torch.Tensor) -> torch.Tensor:
    """A loss in which no two tokens count the same."""
    return (logps * torch.linspace(0.5, 1.5, logps.numel())).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def numbers(model, ids, mask, **kwargs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of the real tokens and the gradient of each parameter."""
    model.zero_grad()
    logps = real_logps(model(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs).logits, ids, mask)
    weighted_sum(logps).backward()
    return logps.detach(), gradients(model)


def alone(model, ids, mask) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of each row by itself, unpadded and in float64: the arbiter."""
    exact, logps = in_precision(model), []
    for row, real in zip(ids, mask, strict=True):
        first, last = real.nonzero()[[0, -1], 0]
        row, real = row[None, first : last + 1], real[None, first : last + 1]  # holes are a part of the row
        holes = {} if real.all() else {"attention_mask": real}
        logps.append(real_logps(exact(input_ids=row, use_cache=False, **holes).logits, row, real))
    weighted_sum(torch.cat(logps)).backward()
    return torch.cat(logps).detach(), gradients(exact)


def padded_numbers(name: str, model, ids, mask) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same as the model computes them by itself."""
    # Rotary positions are relative; absolute ones need the first column of each row.
    return numbers(model, ids, mask, **{"position_ids": padded_positions(mask)} if name == "gpt2" else {})


def assert_same_numbers(got, expected) -> None:
    assert_close(got[0], expected[0], terms=64, depth=24)
    assert_same_gradients(got[1], expected[1])


def assert_same_gradients(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert_gradients_close(got, expected, terms=64, depth=48)


def logits_of(model, ids, mask, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **kwargs).logits


def assert_equal_where_real(got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    assert_close(got[mask.bool()], expected[mask.bool()], terms=64, depth=24)


TINY = SHAPE | {"num_hidden_layers": 2}


def merge_segments(layout: Layout) -> Layout:
    """Every row attends to the rows before it."""
    lengths = SegmentLengths.of([layout.packed_tokens])
    return replace(layout, key_index=None, queries=lengths, keys=lengths, spans=lengths.lengths)
