"""A slow, exact stand-in for the functions of the `flash-attn` package, for tests on any device and dtype.

Semantics are those of flash-attn 2.1 and newer: masks are aligned to the bottom right corner, windows are inclusive on
both sides. Scores and softmax are computed in fp32. Arguments are checked more strictly than by the real kernels,
which read wrong memory or drop tokens in silence.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from simulated_gpu import varlen_reference
from torch import Tensor


@dataclass(frozen=True)
class VarlenCall:
    """Arguments of one call of `flash_attn_varlen_func`."""

    total_q: int
    total_k: int
    segments: int
    window_size: tuple[int, int]
    causal: bool


calls: list[VarlenCall] = []
"""Every call of `flash_attn_varlen_func` since the last `calls.clear()`, oldest first."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    **unsupported: Any,
) -> Tensor:
    """Attention of `q` `(B, Lq, N, D)` over `k` and `v` `(B, Lk, K, D)`, every row on its own."""
    _refuse(dropout_p=dropout_p, **unsupported)
    _check(q, k, v, dimensions=4)
    assert q.shape[0] == k.shape[0]
    bounds = (torch.arange(len(x) + 1, device=x.device) * x.shape[1] for x in (q, k))
    flat = (x.flatten(0, 1) for x in (q, k, v))
    window = (window_size[0], 0 if causal else window_size[1])
    return varlen_reference.attend(*flat, *bounds, softmax_scale, window, softcap)[0].view_as(q)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    **unsupported: Any,
) -> Tensor:
    """Attention of `q` `(Tq, N, D)` over `k` and `v` `(Tk, K, D)`, within the segments bounded by `cu_seqlens`."""
    _refuse(dropout_p=dropout_p, **unsupported)
    _check(q, k, v, dimensions=3)
    lengths_q = _lengths(cu_seqlens_q, q.shape[0], max_seqlen_q)
    lengths_k = _lengths(cu_seqlens_k, k.shape[0], max_seqlen_k)
    assert len(lengths_q) == len(lengths_k)
    calls.append(VarlenCall(q.shape[0], k.shape[0], len(lengths_q), tuple(window_size), causal))
    window = (window_size[0], 0 if causal else window_size[1])
    return varlen_reference.attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window, softcap)[0]


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Tensor:
    """Decoding with a paged cache, which no test of a trainer needs."""
    raise NotImplementedError("the reference has no flash_attn_with_kvcache")


def _refuse(**unsupported: Any) -> None:
    """Reject every argument that asks for something this reference does not compute."""
    for name, value in unsupported.items():
        if value is not None and (isinstance(value, Tensor) or value):
            raise NotImplementedError(f"the reference does not support {name}")


def _check(q: Tensor, k: Tensor, v: Tensor, dimensions: int) -> None:
    """Require shapes, dtypes and devices that fit together."""
    assert q.dim() == k.dim() == v.dim() == dimensions
    assert q.dtype == k.dtype == v.dtype
    assert q.device == k.device == v.device
    assert k.shape == v.shape
    assert q.shape[-1] == k.shape[-1] <= 256, "the largest head of the real kernels"
    assert q.shape[-2] % k.shape[-2] == 0


def _lengths(cu_seqlens: Tensor, total: int, max_seqlen: int | Tensor) -> list[int]:
    """Lengths of the segments of `cu_seqlens`, once it is known to bound exactly `total` tokens."""
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.dim() == 1
    assert cu_seqlens.is_contiguous()
    assert len(cu_seqlens) > 1
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, total)
    assert 0 <= min(lengths) <= max(lengths) <= int(max_seqlen)
    return lengths
