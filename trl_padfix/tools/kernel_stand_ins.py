"""
Stand-ins for kernels that do not run on tensors without values: they save what the kernels save, and compute nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction, FunctionCtx

from ..core.mixers.primitives import CHUNK


__all__ = ["STAND_INS", "FourBit", "attend"]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
    return _Attention.apply(query, key, value), None


class _Saving(torch.autograd.Function):
    """A function whose backward makes a gradient for each input; the inputs are the first tensors that it saves."""

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors[: len(ctx.needs_input_grad)]
        return tuple(None if x is None else torch.empty_like(x) for x in inputs)


class _Attention(_Saving):
    """Saves what FlashAttention saves: queries, keys, values, outputs `(B, T, N, D)` and a log-sum-exp per query."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    return _Convolution.apply(x, weight, bias)


def _delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    return _DeltaRule.apply(query, key, value, g, beta), None


class _Convolution(_Saving):
    """Saves what causal-conv1d saves: its input `(B, C, T)`, the weight and the bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)


class _DeltaRule(torch.autograd.Function):
    """
    Saves what flash-linear-attention saves (read in fla-core 0.6.0, not measured): normalised queries and keys
    `(B, T, H, D)` with a float32 factor each, values `(B, T, V, E)`, summed decays, betas, and a row of its chunk's
    matrix for each token and head. In between there are the states of chunks, and their products with each token.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        normalised = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key)]
        factors = [x.new_empty(x.shape[:3], dtype=torch.float32) for x in (query, key)]
        chunk_rows = value.new_empty(*value.shape[:3], CHUNK)
        ctx.save_for_backward(*normalised, *factors, value.contiguous(), torch.empty_like(g), beta, chunk_rows)
        working = _states_and_products(key, value)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        del working
        return out

    @staticmethod
    def backward(ctx: BackwardCFunction, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, _, _, value, g, beta, _ = [*ctx.saved_tensors]
        working = _states_and_products(key, value), _states_and_products(key, value)  # again, and their gradients
        result = tuple(torch.empty_like(x) for x in (query, key, value, g, beta))
        del working
        return result


def _states_and_products(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The state before each chunk, and for each token its row of `w`, `u` and the new values."""
    B, T, V, E = value.shape
    D = key.shape[-1]
    return (
        value.new_empty(B, -(-T // CHUNK), V, D, E),
        value.new_empty(B, T, V, D),
        *(value.new_empty(value.shape) for _ in range(2)),
    )


STAND_INS = {"causal_conv1d_fn": _convolve, "torch_chunk_gated_delta_rule": _delta_rule}
"""Stand-ins by the names under which modules call the functions."""


class FourBit(nn.Linear):
    """A frozen layer whose weights are created for each product; the plan counts the bytes of its 4 bits."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = _Product.apply(input, self.weight)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """`input @ weight.T` with a new weight in forward and in backward, which is freed after the product."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return input @ torch.empty_like(weight).T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] @ torch.empty_like(ctx.weight), None
