"""Attention segment by segment: what its graph keeps on a CPU, and the precision of the gradients of shared keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from kit.trainer_runs import build_model
from torch.multiprocessing.reductions import StorageWeakRef
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


# -- copies of keys


def shared_step(
    monkeypatch: pytest.MonkeyPatch, copies: int, *, before_backward: Callable = lambda keys: None, **config: Any
) -> tuple[torch.Tensor, int]:
    """The gradients of a batch with a shared prompt, and how many gathered copies live after its forward."""
    monkeypatch.setattr(kernels, "COPIES", copies)
    gathered, keys, original = [], [], kernels.gather_keys

    def gather(layout, *states):
        keys.extend(states)
        found = original(layout, *states)
        gathered.extend(StorageWeakRef(x.untyped_storage()) for x in found)
        return found

    monkeypatch.setattr("trl_padfix.core.attention.attention.gather_keys", gather)
    model = build_model(num_hidden_layers=2, **config).to(torch.bfloat16)
    ids = torch.randint(2, 38, (4, 47), generator=torch.Generator().manual_seed(0))
    ids[:, :36] = ids[0, :36]
    with remove_padding(model, prefix_sharing=True):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        alive = sum(not copy.expired() for copy in gathered)
        before_backward(keys)
        logits.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), alive


@pytest.mark.parametrize("config", [{}, {"attn_implementation": "eager"}, {"sliding_window": 7}])
def test_backward_gathers_copied_keys_again_with_the_same_bits(config, monkeypatch):
    if "sliding_window" in config:
        config = config | {"use_sliding_window": True, "max_window_layers": 0}
    gradients, alive = shared_step(monkeypatch, 0, **config)
    with_copies, copies = shared_step(monkeypatch, 10**6, **config)
    assert torch.equal(gradients, with_copies)
    # Keys and values of two layers; the eager function keeps copies of its own, one for each head.
    assert (alive, copies) == (0, 0 if "attn_implementation" in config else 4)


def test_hooks_of_others_decide_what_is_kept(monkeypatch):
    """A checkpoint, or offloading, sees all tensors that it would see without this package's hooks."""
    with torch.autograd.graph.save_on_cpu():
        gradients, _ = shared_step(monkeypatch, 0)
    model = []
    monkeypatch.setattr(kernels, "_Regathered", lambda *args: model.append(args))
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(shared_step(monkeypatch, 0)[0], gradients, rtol=0, atol=0)
    assert not model


def doubled(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def test_keys_that_were_modified_before_backward_are_an_error(monkeypatch):
    with pytest.raises(RuntimeError, match="modified in place"):
        shared_step(monkeypatch, 0, before_backward=lambda keys: doubled(keys[0]))
    # The control, behind the back of version counters: backward reads the states of the row.
    gradients, _ = shared_step(monkeypatch, 0)
    written, _ = shared_step(monkeypatch, 0, before_backward=lambda keys: keys[0].data.mul_(2))
    assert not torch.equal(written, gradients)
