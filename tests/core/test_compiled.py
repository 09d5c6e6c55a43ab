"""Layers compiled one by one: the numbers of uncompiled ones, one graph for all lengths, and what stays uncompiled."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch._dynamo
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix import remove_padding
from trl_padfix.core.compiled import compile_layers


def build(layers: int = 2, **more) -> Qwen2ForCausalLM:
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(**sizes | {"num_hidden_layers": layers, "initializer_range": 0.08} | more)
        return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of which no two have the same shape, and rows of which pairs begin alike."""
    generator, made = torch.Generator().manual_seed(0), []
    for n in range(count):
        rows, columns = 4 + 2 * (n % 5), 12 + 3 * n
        ids = torch.randint(0, 96, (rows, columns), generator=generator)
        ids[rows // 2 :, : columns // 2] = ids[: rows // 2, : columns // 2]
        lengths = columns - torch.randint(1, columns // 3, (rows, 1), generator=generator)
        made.append((ids, (torch.arange(columns) < lengths).long()))
    return made


def step(model, ids, mask) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * (mask[:, 1:] * mask[:, :-1])
    (logps * torch.linspace(-1, 1, logps.numel()).view(logps.shape)).sum().backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    """Graphs that were compiled, and breaks in them."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("sharing", [False, True], ids=["padding-free", "prefix sharing"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_twenty_shapes_are_one_graph_with_the_same_numbers(backend, sharing):
    plain, compiled = build().train(), build().train()
    with remove_padding(plain, prefix_sharing=sharing), remove_padding(compiled, prefix_sharing=sharing) as handle:
        assert compile_layers(handle, backend=backend) == {}
        for ids, mask in batches(20):
            want, got = step(plain, ids, mask), step(compiled, ids, mask)
            torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-5)
            assert (got[1] - want[1]).norm() / want[1].norm() < 1e-5
    assert graphs() == (1, 0)
