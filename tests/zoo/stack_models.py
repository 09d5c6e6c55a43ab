"""
Tiny models and ragged batches that can be built on every supported version of transformers, and the one reference for
all of them: each row computed alone, without padding, by the model as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from zoo import models
from zoo.models import EOS, PAD
from zoo.models import real_logps as logps


__all__ = ["CASES", "EOS", "PAD", "ROWS", "backward", "build", "logps", "pad", "relative_error"]

_SHAPE = {"num_hidden_layers": 2, "max_position_embeddings": 64}
_SHAPES = dict.fromkeys(("qwen2", "llama", "mistral"), _SHAPE) | {
    "gpt2": {"n_layer": 2, "n_positions": 64, "n_inner": 48}
}

CASES = [
    (name, implementation)
    for name in _SHAPES
    for implementation in ("sdpa", "eager", "flash_attention_2")
    # transformers asks GPT-2 for the dtype of an `nn.Linear` there, and it has none.
    if (name, implementation) != ("gpt2", "flash_attention_2")
]

ROWS = [
    [5, 6, 7, 8, 9, 10, 11, 12, 13],  # a prompt of six tokens and an answer
    [5, 6, 7, 8, 9, 10, 20, 21, 22, 23, 24],  # the same prompt, another answer
    [5, 6, 7, 16, 17],  # begins as they do
    [29, 6, 7, 8],  # does not
]


def build(name: str = "qwen2", implementation: str = "sdpa", auto: Any = AutoModelForCausalLM, **config: Any) -> Any:
    """A model in evaluation mode; one with `flash_attention_2` inside `flash_attention_stand_in()` only."""
    return models.build(name, implementation, auto=auto, **_SHAPES[name] | {"bos_token_id": None} | config)


def pad(rows: list[list[int]], side: str, pad_id: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `(B, L)`, padded `"left"`, `"right"`, or by turns (`"mixed"`), with two columns of nothing but."""
    columns = max(map(len, rows)) + 2
    ids = torch.full((len(rows), columns), pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        begin = columns - len(row) if side == "left" or (side == "mixed" and i % 2) else 0
        ids[i, begin : begin + len(row)] = torch.tensor(row)
        mask[i, begin : begin + len(row)] = 1
    return ids, mask


def backward(model: torch.nn.Module, scores: torch.Tensor) -> torch.Tensor:
    """Every gradient of a weighted sum of `scores`, in one vector; the weights tell scores apart."""
    model.zero_grad()
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    (scores * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
