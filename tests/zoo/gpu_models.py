"""Tiny models and ragged pairs for the simulated GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix.core.layout.layout import SegmentLengths


VOCABULARY = 96


def build(
    layers: int = 2, dtype: torch.dtype = torch.float32, implementation: str = "sdpa", **more
) -> Qwen2ForCausalLM:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    config = Qwen2Config(
        **{**sizes, "num_hidden_layers": layers, "num_key_value_heads": 2, "initializer_range": 0.08} | more
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM._from_config(config, attn_implementation=implementation).eval()
    # As a checkpoint in half precision is loaded: the frequencies of the rotary embedding stay in float32.
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype).model.rotary_emb.inv_freq = frequencies
    return model


def pairs(rows: int, columns: int = 24, common: int = 12, everyone: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which the second half begins as the first does, and all begin with the same few tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (rows, columns), generator=generator)
    ids[rows // 2 :, :common] = ids[: rows // 2, :common]
    ids[:, :everyone] = ids[0, :everyone]
    lengths = torch.randint(common + 2, columns + 1, (rows, 1), generator=generator)
    lengths[0], lengths[1] = columns, columns - 3
    return ids, (torch.arange(columns) < lengths).long()


def step(model, ids, mask, *, autocast: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a forward, and the gradient of their weighted sum."""
    model.zero_grad()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * (mask[:, 1:] * mask[:, :-1])
    weights = torch.linspace(0.5, 1, logps.numel(), device=ids.device).view_as(logps)
    (logps * weights).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    return logps.detach().cpu(), gradient.cpu()


def second_row_sees_the_first(layout: Any) -> Any:
    """The second row begins one token early among the keys."""
    device, layout = layout.real_index.device, layout.to("cpu")
    bounds = layout.queries.cu_seqlens.tolist()
    begins = [begin - (row == 1) for row, begin in enumerate(bounds[:-1])]
    index = torch.cat([torch.arange(begin, end) for begin, end in zip(begins, bounds[1:], strict=True)])
    lengths = [end - begin for begin, end in zip(begins, bounds[1:], strict=True)]
    wrong = dataclasses.replace(layout, key_index=index, keys=SegmentLengths.of(lengths))
    return wrong.to(device)
