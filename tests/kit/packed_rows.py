"""One packed row of a tiny model, for measuring its memory."""

from __future__ import annotations

import torch


SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip
LENGTHS = (2048, 8192, 32768)


def packed_step(model, tokens: int, sequence: int = 256) -> None:
    """Forward and backward of one packed row."""
    positions = torch.arange(tokens)[None] % sequence
    hidden = model.model(torch.arange(tokens)[None] % 64, position_ids=positions, use_cache=False)
    hidden.last_hidden_state.square().mean().backward()
