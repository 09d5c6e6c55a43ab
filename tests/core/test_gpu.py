"""On a CUDA GPU: each attention backend in half precision, as close to float32 as the padded forward is."""

import copy

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix import prefix_sharing_layout, remove_padding
from trl_padfix.core import attention
from trl_padfix.core.kernels import _gather_keys, torch_varlen_is_complete


pytestmark = pytest.mark.gpu

CONFIG = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.08,
)  # fmt: skip


def pairs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows, four pairs with common prompts, right- and left-padded, longer than one kernel block."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 512, (8, 700), generator=generator)
    ids[4:, :400] = ids[:4, :400]
    mask = torch.ones_like(ids)
    for row, length in enumerate((700, 650, 480, 401, 690, 500, 600, 450)):
        mask[row, length:] = 0
    for row in (1, 5):
        ids[row], mask[row] = ids[row].roll(50), mask[row].roll(50)
    return ids.to(device), mask.to(device)


def log_probs_and_gradient(model, ids, mask) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    positions = (torch.arange(ids.shape[1], device=ids.device) - mask.argmax(1, keepdim=True)).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    logps = logps * (mask[:, 1:] * mask[:, :-1])
    (logps * torch.linspace(-1, 1, logps.numel(), device=ids.device).view_as(logps)).sum().backward()
    return logps.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


def build(config: Qwen2Config, implementation: str) -> Qwen2ForCausalLM:
    """A model with a config of its own: `_from_config` writes the implementation into the one that it is given."""
    return Qwen2ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=implementation).cuda()


def to_bfloat16(model: Qwen2ForCausalLM) -> None:
    """As a checkpoint in bfloat16 is loaded: the frequencies of the rotary embedding stay in float32."""
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.bfloat16().model.rotary_emb.inv_freq = frequencies


def counted(monkeypatch, module, name: str) -> list:
    """A list that grows with every call of a function."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(name), function(*args))[1])
    return calls


def implementations() -> list:
    flash = pytest.param(
        "flash_attention_2",
        marks=pytest.mark.skipif(not _has_flash_attn(), reason="flash-attn is not installed: pip install flash-attn"),
    )
    return ["sdpa", "eager", flash]


def _has_flash_attn() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "fp32 under autocast"])
@pytest.mark.parametrize("implementation", implementations())
def test_bf16_packed_is_as_close_to_float32_as_bf16_padded(implementation, autocast, window, sharing, monkeypatch):
    torch.manual_seed(0)
    config = Qwen2Config(**CONFIG, use_sliding_window=window is not None, sliding_window=window, max_window_layers=0)
    exact, half = build(config, "eager"), build(config, implementation)
    half.load_state_dict(exact.state_dict())
    if not autocast:
        to_bfloat16(half)
    ids, mask = pairs("cuda")
    logps, gradient = log_probs_and_gradient(exact, ids, mask)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        padded_logps, padded_gradient = log_probs_and_gradient(half, ids, mask)
    varlen = counted(monkeypatch, attention, "attend_torch_varlen")
    with (
        remove_padding(half, prefix_sharing=sharing) as handle,
        torch.autocast("cuda", torch.bfloat16, enabled=autocast),
    ):
        packed_logps, packed_gradient = log_probs_and_gradient(half, ids, mask)
    assert exact.config._attn_implementation == "eager"
    if implementation == "sdpa" and torch_varlen_is_complete():
        assert len(varlen) == config.num_hidden_layers
    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert (packed_logps - logps).abs().mean() <= 1.5 * (padded_logps - logps).abs().mean() + 1e-3
    error = lambda g: ((g - gradient).norm() / gradient.norm()).item()  # noqa: E731
    assert error(packed_gradient) <= 1.5 * error(padded_gradient) + 1e-3


@pytest.mark.skipif(not torch_varlen_is_complete(), reason="this torch has no complete varlen_attn")
def test_torch_varlen_attention_runs_and_is_aligned_to_the_bottom_right():
    from torch.nn.attention.varlen import varlen_attn

    q = torch.randn(3, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(7, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    bounds = lambda n: torch.tensor([0, n], dtype=torch.int32, device="cuda")  # noqa: E731
    out = varlen_attn(q, k, v, bounds(3), bounds(7), 3, 7, window_size=(-1, 0))
    visible = torch.ones(3, 7, dtype=torch.bool, device="cuda").tril(4)
    q32, k32, v32 = (x.detach().float().transpose(0, 1).requires_grad_() for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q32, k32, v32, attn_mask=visible)
    torch.testing.assert_close(out.float(), expected.transpose(0, 1), atol=2e-2, rtol=2e-2)
    out.float().sum().backward()
    expected.sum().backward()
    for got, want in ((q, q32), (k, k32), (v, v32)):
        torch.testing.assert_close(got.grad.float(), want.grad.transpose(0, 1), atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("sharing", [False, True])
def test_float32_on_the_gpu_equals_the_padded_computation(sharing):
    torch.manual_seed(0)
    model = build(Qwen2Config(**CONFIG), "sdpa")
    ids, mask = pairs("cuda")
    logps, gradient = log_probs_and_gradient(model, ids, mask)
    with remove_padding(model, prefix_sharing=sharing):
        packed_logps, packed_gradient = log_probs_and_gradient(model, ids, mask)
    assert (packed_logps - logps).abs().max() < 1e-4
    assert ((packed_gradient - gradient).norm() / gradient.norm()).item() < 1e-4


def test_the_gradients_of_shared_keys_are_the_same_in_every_run():
    ids, mask = pairs("cuda")
    layout = prefix_sharing_layout(ids, mask)
    states = torch.randn(1, 2, layout.packed_tokens, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(1, 2, layout.key_index.numel(), 64, device="cuda", dtype=torch.bfloat16)
    runs = [torch.autograd.grad(_gather_keys(states, layout), states, upstream)[0] for _ in range(20)]
    assert all(torch.equal(run, runs[0]) for run in runs)
