"""Attention segment by segment: what its graph keeps on a CPU, and the precision of the gradients of shared keys."""

import pytest
import torch
import torch.nn.functional as functional
from kit.trainer_runs import build_model
from zoo.gpu_models import pairs

import trl_padfix.core.attention.segments as kernels
from trl_padfix import prefix_sharing_layout, remove_padding


@pytest.mark.parametrize("config", [{}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}])
def test_behind_a_shared_prefix_no_mask_is_kept(config):
    """Nor probabilities: what is kept grows with the tokens. The eager function shows what would be seen."""

    def sizes(attention: str) -> set[tuple[int, ...]]:
        model = build_model(attn_implementation=attention, **config)
        ids = torch.randint(2, 38, (4, 47), generator=torch.Generator().manual_seed(0))
        ids[:, :36] = ids[0, :36]
        found = set()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: found.add(tuple(x.shape[-2:])) or x, lambda x: x)
        with hooks, remove_padding(model, prefix_sharing=True):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum()
        return found

    keys = 17 if config else 47  # of the 11 queries of a row
    assert (11, keys) in sizes("eager")
    assert (11, keys) not in sizes("sdpa")


@pytest.mark.parametrize(("grouped", "window", "chunk"), [(True, None, None), (False, 3, None), (True, None, 4)])
def test_the_kernel_of_a_cpu_has_the_gradients_of_a_mask(window, chunk, grouped, monkeypatch):
    monkeypatch.setattr(kernels, "HAS_GROUPED_HEADS", grouped and kernels.HAS_GROUPED_HEADS)
    lengths = [(5, 9), (130, 300), (300, 300)]  # queries and keys of each segment; a call has at most 128 queries
    tokens, keys = (sum(x) for x in zip(*lengths, strict=True))
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, *size, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for size in ((4, tokens), (2, keys), (2, keys))
    ]
    places = [(torch.arange(k - q, k), torch.arange(k)) for q, k in lengths]

    def of_kernel(chunk):
        positions = (torch.cat(x) for x in zip(*places, strict=True))
        sizes = [(*length, window, chunk) for length in lengths]
        return kernels.CausalAttention.apply(*states, *positions, sizes, 0.3).transpose(1, 2)

    mask = torch.block_diag(*(kernels.visible_keys(*place, window, chunk)[0, 0] for place in places))
    expected = functional.scaled_dot_product_attention(*states, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(of_kernel(chunk), expected)
    upstream = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(*(torch.autograd.grad(x, states, upstream) for x in (of_kernel(chunk), expected)))
    if window is None:  # the control: without the mask of the chunk
        assert torch.allclose(of_kernel(None), expected) is (chunk is None)


def test_gradients_of_shared_keys_are_one_sum_in_float32():
    layout = prefix_sharing_layout(*pairs(512, everyone=8))
    upstream = torch.randn(layout.key_index.numel(), 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = torch.zeros(layout.packed_tokens, 2, 16, dtype=torch.float64)
    exact.index_add_(0, layout.key_index, upstream.double())

    def relative_error(got: torch.Tensor) -> torch.Tensor:
        return (got.double() - exact).norm() / exact.norm()

    ours = kernels.sum_by_token(upstream, *layout.key_sort_order)
    assert relative_error(ours) <= 1.7e-3
    assert all(torch.equal(kernels.sum_by_token(upstream, *layout.key_sort_order), ours) for _ in range(3))

    running = torch.zeros_like(exact, dtype=torch.bfloat16)  # a sum that is rounded after every addition
    for token, row in zip(layout.key_index.tolist(), upstream, strict=True):
        running[token] += row
    assert relative_error(running) > 1e-2
