"""
Computations of the tests that need a GPU: models in half precision beside one in float32, packed and padded.

They run on the simulated device, too, so that what they notice is known without a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from trl_padfix import remove_padding
from trl_padfix.core.attention import attention


__all__ = ["CONFIG", "build", "check_half_precision", "log_probs_and_gradient", "pairs", "to_bfloat16"]

CONFIG = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.08,
)  # fmt: skip


def pairs(columns: int = 700) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows, four pairs with common prompts, right- and left-padded, by default longer than one kernel block."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 512, (8, columns), generator=generator)
    ids[4:, : columns * 4 // 7] = ids[:4, : columns * 4 // 7]
    mask = torch.ones_like(ids)
    for row, length in enumerate((700, 650, 480, 401, 690, 500, 600, 450)):
        mask[row, length * columns // 700 :] = 0
    for row in (1, 5):
        ids[row], mask[row] = (x[row].roll(columns // 14) for x in (ids, mask))
    return ids, mask


def log_probs_and_gradient(
    model: Qwen2ForCausalLM, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    positions = (torch.arange(ids.shape[1], device=ids.device) - mask.argmax(1, keepdim=True)).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
    logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    logps = logps * (mask[:, 1:] * mask[:, :-1])
    (logps * torch.linspace(-1, 1, logps.numel(), device=ids.device).view_as(logps)).sum().backward()
    return logps.detach().cpu(), torch.cat([p.grad.float().flatten() for p in model.parameters()]).cpu()


def build(config: Qwen2Config, implementation: str) -> Qwen2ForCausalLM:
    """A model with a config of its own: `_from_config` writes the implementation into the one that it is given."""
    return Qwen2ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=implementation)


def to_bfloat16(model: Qwen2ForCausalLM) -> None:
    """As a checkpoint in bfloat16 is loaded: the frequencies of the rotary embedding stay in float32."""
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.bfloat16().model.rotary_emb.inv_freq = frequencies


def check_half_precision(
    place: Callable[[Any], Any],
    *,
    implementation: str,
    autocast: bool,
    window: int | None,
    sharing: bool,
    columns: int = 700,
    varlen: bool = True,
    **config: Any,
) -> None:
    """
    In half precision packed is as close to float32 as padded is; with `varlen` on torch's variable-length kernel.

    Args:
        place (`Callable`):
            Takes a model or a tensor to the device.
    """
    torch.manual_seed(0)
    given = CONFIG | {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": 0}
    whole = Qwen2Config(**given | config)
    exact, half = build(whole, "eager"), build(whole, implementation)
    half.load_state_dict(exact.state_dict())
    if not autocast:
        to_bfloat16(half)
    names = exact.config._attn_implementation, half.config._attn_implementation
    assert names == ("eager", implementation), f"the models attend with {names}"
    frequencies = half.model.rotary_emb.inv_freq.dtype
    assert frequencies == torch.float32, f"the frequencies are rounded to {frequencies}"
    exact, half, ids, mask = (place(x) for x in (exact, half, *pairs(columns)))
    logps, gradient = log_probs_and_gradient(exact, ids, mask)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        padded_logps, padded_gradient = log_probs_and_gradient(half, ids, mask)
    with pytest.MonkeyPatch.context() as patch:
        calls, attend = [], attention.attend_torch_varlen
        patch.setattr(attention, "attend_torch_varlen", lambda *args: (calls.append(1), attend(*args))[1])
        with (
            remove_padding(half, prefix_sharing=sharing) as handle,
            torch.autocast("cuda", torch.bfloat16, enabled=autocast),
        ):
            packed_logps, packed_gradient = log_probs_and_gradient(half, ids, mask)
    if implementation == "sdpa" and varlen:
        assert len(calls) == whole.num_hidden_layers, f"{len(calls)} layers ran on the varlen kernel"
    assert handle.stats.packed_tokens < handle.stats.padded_tokens
    assert (packed_logps - logps).abs().mean() <= 1.5 * (padded_logps - logps).abs().mean() + 1e-3
    error = lambda g: ((g - gradient).norm() / gradient.norm()).item()  # noqa: E731
    assert error(packed_gradient) <= 1.5 * error(padded_gradient) + 1e-3
