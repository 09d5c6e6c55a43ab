"""
Tiny models and ragged batches that can be built on every supported version of transformers, and the one reference for
all of them: each row computed alone, without padding, by the model as it is.

The weights are large (`initializer_range` of 0.2), so a token that sees one token too many moves its log-probability
by far more than any tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)


EOS, PAD = 1, 39

_SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_CONFIGS: dict[str, Callable[..., Any]] = {
    "qwen2": lambda **more: Qwen2Config(**_SHAPE | more),
    "llama": lambda **more: LlamaConfig(**_SHAPE | more),
    "mistral": lambda **more: MistralConfig(**_SHAPE | {"sliding_window": 4} | more),
    "gpt2": lambda **more: GPT2Config(**_GPT2_SHAPE | more),
}

CASES = [
    (name, implementation)
    for name in _CONFIGS
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = auto.from_config(_CONFIGS[name](**config), attn_implementation=implementation)
        return model.eval()


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


def logps(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the real tokens behind a real token, row after row."""
    scores = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return scores[(mask[:, :-1] * mask[:, 1:]).bool()]


def alone(compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ids: torch.Tensor, mask: torch.Tensor):
    """What `compute(ids, mask)` gives for the real tokens of each row by themselves, row after row."""
    rows = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
    return torch.cat([compute(row, torch.ones_like(row)) for row in rows])


def backward(model: torch.nn.Module, scores: torch.Tensor) -> torch.Tensor:
    """Every gradient of a weighted sum of `scores`, in one vector; the weights tell scores apart."""
    model.zero_grad()
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(1))
    (scores * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()
