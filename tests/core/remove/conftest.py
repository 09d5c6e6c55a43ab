"""Models with `flash_attention_2` on a CPU, and a model with a batch and its padded logits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import transformers
from zoo.model_numbers import logits_of
from zoo.models import batch, build


class Case(NamedTuple):
    model: transformers.PreTrainedModel
    ids: torch.Tensor
    mask: torch.Tensor
    logits: torch.Tensor


@pytest.fixture
def mixed() -> Case:
    """A model without padding removal, rows padded left and right by turns, and the logits of the padded batch."""
    model, (ids, mask) = build("qwen2"), batch("mixed")
    return Case(model, ids, mask, logits_of(model, ids, mask))


@pytest.fixture(autouse=True, scope="module")
def _flash_attention(flash):
    """In every test here."""
