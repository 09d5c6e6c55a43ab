"""
Variable-length attention on the CPU, forward and backward, as torch's and FlashAttention's kernels compute it.

The simulated device and the reference of flash-attn compute with it, and [`on_cpu`] registers it as the CPU kernel of
torch's own operator, so that code that was written for a GPU runs on tensors of the CPU.
"""

from __future__ import annotations

import functools
from collections import deque
from itertools import pairwise
from typing import Any

import torch


__all__ = ["attend", "attend_backward", "calls", "compile_on_cpu", "on_cpu"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    scale: float | None,
    window: tuple[int, int],
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attended values `(T, N, D)` and log-sum-exp `(N, T)`, computed in float32."""
    outputs, sums = [], []
    for q, k, v, hidden in _segments(query, key, value, cu_seq_q, cu_seq_k, window):
        scores = torch.einsum("qnd,knd->nqk", q, k) * _scale(query, scale)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(hidden, -torch.inf)
        outputs.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs).to(query.dtype), torch.cat(sums, 1)


def attend_backward(
    upstream: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    scale: float | None,
    window: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    gradients: list[list[torch.Tensor]] = [[], [], []]
    rows = upstream.float().split(cu_seq_q.diff().tolist())
    for g, (q, k, v, hidden) in zip(rows, _segments(query, key, value, cu_seq_q, cu_seq_k, window), strict=True):
        scores = (torch.einsum("qnd,knd->nqk", q, k) * _scale(query, scale)).masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        of_weights = torch.einsum("qnd,knd->nqk", g, v)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * _scale(query, scale)
        gradients[0].append(torch.einsum("nqk,knd->qnd", of_scores, k))
        gradients[1].append(torch.einsum("nqk,qnd->knd", of_scores, q).unflatten(1, (heads, group)).sum(2))
        gradients[2].append(torch.einsum("nqk,qnd->knd", weights, g).unflatten(1, (heads, group)).sum(2))
    of_query, of_key, of_value = (torch.cat(parts) for parts in gradients)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _segments(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, window: tuple[int, int]) -> Any:
    """Query, key and value of each segment in float32, heads repeated, and what is hidden."""
    group = query.shape[1] // key.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        ahead = torch.arange(k1 - k0)[None] - (torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0))
        hidden = torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
        if window[1] >= 0:
            hidden |= ahead > window[1]
        if window[0] >= 0:
            hidden |= ahead < -window[0]
        k, v = (x[k0:k1].float().repeat_interleave(group, 1) for x in (key, value))
        yield query[q0:q1].float(), k, v, hidden


calls: deque[tuple[Any, ...]] = deque(maxlen=2)
"""The arguments of the last two calls of the CPU's kernels, without those that only dropout reads."""


@functools.cache
def on_cpu() -> None:
    """Give torch's operator a kernel for tensors of the CPU; it stays for the rest of the process."""

    def forward(*args, **options):
        calls.append((*args, {k: v for k, v in options.items() if v is not None}))
        query, key, value, cu_q, cu_k = args[:5]
        window = options["window_size_left"], options["window_size_right"]
        output, sums = attend(query, key, value, cu_q, cu_k, options.get("scale"), window)
        return output, sums, torch.zeros(2, dtype=torch.uint64), torch.empty(()), torch.empty(0)

    def backward(*args, **options):
        calls.append((*args[:12], options))  # the state of the generator follows
        upstream, query, key, value, _, _, cu_q, cu_k = args[:8]
        window = options["window_size_left"], options["window_size_right"]
        return attend_backward(upstream, query, key, value, cu_q, cu_k, options.get("scale"), window)

    _library.impl("_flash_attention_forward", forward, "CPU")
    _library.impl("_flash_attention_backward", backward, "CPU")


_library = torch.library.Library("aten", "IMPL")


def compile_on_cpu(monkeypatch: Any) -> None:
    """Let layers be compiled on a CPU and in any precision, with its kernel for torch's operator."""
    on_cpu()
    monkeypatch.setattr("trl_padfix.core.patches.compiled.is_half_on_gpu", lambda *states: True)
