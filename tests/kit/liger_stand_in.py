"""
A stand-in for `liger_kernel` in plain torch: its names, signatures and ways to patch a model, without Triton.

Like Liger it binds the forwards of norms and MLPs anew on the instances, puts its rotary embedding into transformers'
module, and can replace the forward of the model by one with a fused loss. Its backward of a norm writes into the
gradient that it is given, as Liger's does.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from types import MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as functional
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2 import modeling_qwen2


__all__ = ["liger_stand_in"]

_tokens: Counter = Counter()
"""Tokens that went through each kernel, padding included."""


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = states.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(states, weight, scale)
        return weight * (states.float() * scale).to(states.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple:
        states, weight, scale = ctx.saved_tensors
        (given,) = upstream
        normed, scaled = states.float() * scale, given.float() * weight
        of_weight = (given.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
        inner = (scaled * normed).mean(-1, keepdim=True)
        return given.copy_(scale * (scaled - normed * inner)), of_weight, None


def _norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    _tokens["rms_norm"] += hidden_states.shape[:-1].numel()
    return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


def _swiglu(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    _tokens["swiglu"] += x.shape[:-1].numel()
    return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: Any = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    _tokens["rope"] += q.shape[0] * q.shape[2]
    assert cos.shape[0] in (1, q.shape[0])  # the kernel takes one row of angles, or one for each row
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    return turned(q), turned(k)


def _fused_forward(
    self: nn.Module,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    use_cache: bool | None = None,
    skip_logits: bool | None = None,
    return_token_accuracy: bool = False,
    **kwargs: Any,
) -> CausalLMOutputWithPast:
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    given |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache}
    hidden = self.model(**given).last_hidden_state
    if labels is None:
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    logits, target = self.lm_head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
    _tokens["fused_linear_cross_entropy"] += len(target)
    items = kwargs.get("num_items_in_batch")
    loss = functional.cross_entropy(logits, target, reduction="mean" if items is None else "sum")
    output = CausalLMOutputWithPast(loss=loss if items is None else loss / items)
    scored = target != -100
    output["token_accuracy"] = (logits.argmax(-1) == target)[scored].float().mean()
    return output


def _apply_to_qwen2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Any = None,
) -> None:
    assert not cross_entropy
    if rope:
        modeling_qwen2.apply_rotary_pos_emb = _rotary
    if fused_linear_cross_entropy:
        model.forward = MethodType(_fused_forward, model)
    for module in model.modules():
        if rms_norm and isinstance(module, modeling_qwen2.Qwen2RMSNorm):
            module.__dict__["forward"] = MethodType(_norm, module)
        if swiglu and isinstance(module, modeling_qwen2.Qwen2MLP):
            module.__dict__["forward"] = MethodType(_swiglu, module)


def _apply_liger_kernel_to_instance(model: Any, **kwargs: Any) -> None:
    assert model.config.model_type == "qwen2"
    known = inspect.signature(_apply_to_qwen2).parameters
    _apply_to_qwen2(model=model, **{k: v for k, v in kwargs.items() if k in known})


@contextlib.contextmanager
def liger_stand_in() -> Iterator[Counter]:
    """`liger_kernel` is installed until the block ends; counts the tokens that its kernels see."""
    package, layers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    layers._apply_liger_kernel_to_instance = _apply_liger_kernel_to_instance
    package.transformers = layers
    names = {"liger_kernel": package, "liger_kernel.transformers": layers}
    _tokens.clear()
    with contextlib.ExitStack() as stack:
        for name, module in names.items():  # one by one: what is imported in the block stays imported
            stack.callback(sys.modules.pop, name, None)
            sys.modules[name] = module
        stack.callback(setattr, modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] in ("transformers", "trl") and m]:
            if "is_liger_kernel_available" in vars(module):
                stack.enter_context(mock.patch.object(module, "is_liger_kernel_available", return_value=True))
        # Ours refuses Triton kernels where there is no GPU.
        stack.enter_context(mock.patch("trl_padfix.trainers.checks.runs_triton", return_value=True))
        yield _tokens
