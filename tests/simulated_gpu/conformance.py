"""Cases of variable-length attention that packed forwards need, and the comparison of a kernel with exact results."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


__all__ = ["CASES", "Case", "bounds", "conform", "of_flash_attn"]


@dataclass(frozen=True)
class Case:
    """Segments and heads, and what is asked beyond causal attention."""

    queries: tuple[int, ...] = (5, 130, 1, 64)
    keys: tuple[int, ...] = (5, 300, 77, 64)
    heads: tuple[int, int] = (4, 2)
    size: int = 64
    window: int | None = None
    asked: dict[str, Any] = field(default_factory=dict)


CASES = {
    "whole rows": Case(queries=(7, 33, 1), keys=(7, 33, 1)),
    "unequal lengths": Case(),
    "one query, many keys": Case(queries=(1, 1), keys=(200, 3)),
    "equal heads": Case(heads=(2, 2)),
    "seven heads for one": Case(heads=(14, 2)),
    "window": Case(window=32),
    "window of one": Case(window=1),
    "window wider than rows": Case(window=1000),
    "heads of 8": Case(size=8),
    "heads of 80": Case(size=80),
    "heads of 128": Case(size=128),
    "heads of 256": Case(size=256),
    "scale": Case(asked={"scale": 0.3}),
    "softcap": Case(asked={"softcap": 5.0}),
    "sinks": Case(asked={"sinks": True}),
    "deterministic": Case(asked={"deterministic": True}),
}


def exact(states: list[torch.Tensor], case: Case, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention of each segment, dense and in float64."""
    query, key, value = states
    outputs, group = [], case.heads[0] // case.heads[1]
    for q, k, v in zip(query.split(case.queries), key.split(case.keys), value.split(case.keys), strict=True):
        scores = torch.einsum("qnd,knd->nqk", q, k.repeat_interleave(group, 1))
        scores = scores * case.asked.get("scale", case.size**-0.5)
        if "softcap" in case.asked:
            scores = case.asked["softcap"] * torch.tanh(scores / case.asked["softcap"])
        behind = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
        behind = behind - torch.arange(len(k), device=q.device)[None]
        hidden = (behind < 0) | (behind >= (case.window or len(k)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        outputs.append(torch.einsum("nqk,knd->qnd", weights, v.repeat_interleave(group, 1)))
    return torch.cat(outputs)


def bounds(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def of_flash_attn(function: Callable) -> Callable:
    """A kernel with the arguments of the `flash-attn` packages."""
    known = inspect.signature(function).parameters
    sink = next((name for name in ("s_aux", "learnable_sink", "sinks") if name in known), None)

    def run(states: list[torch.Tensor], case: Case, sinks: torch.Tensor | None) -> torch.Tensor:
        more = {name: case.asked[name] for name in {"softcap", "deterministic"} & case.asked.keys()}
        if sinks is not None:
            more[sink] = sinks
        if case.window is not None:
            more["window_size"] = (case.window - 1, 0)
        given = {"cu_seqlens_q": bounds(case.queries, str(states[0].device))}
        given |= {"cu_seqlens_k": bounds(case.keys, str(states[0].device))}
        given |= {"max_seqlen_q": max(case.queries), "max_seqlen_k": max(case.keys)}
        scale = case.asked.get("scale", case.size**-0.5)
        output = function(*states, **given, softmax_scale=scale, causal=True, **more)
        return output[0] if isinstance(output, tuple) else output

    run.asked = known.keys() | ({"sinks"} if sink else set()) | {"scale"}
    return run


def conform(kernel: Callable, case: Case, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output and gradients of a kernel are those of attention written out, and of no other question."""
    if missing := case.asked.keys() - kernel.asked:
        pytest.skip(f"it has no {', '.join(missing)}")
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, case.size, generator=generator).to(device, dtype)

    drawn = [draw(sum(case.queries), case.heads[0]), *(draw(sum(case.keys), case.heads[1]) for _ in range(2))]
    # Keys and values come as views of `(heads, tokens, size)`, as the layers of a model make them.
    states = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in drawn]
    doubles = [x.detach().double().requires_grad_() for x in drawn]
    sinks = torch.randn(case.heads[0], generator=generator).to(device, dtype) if "sinks" in case.asked else None
    upstream = draw(sum(case.queries), case.heads[0])

    output = kernel(states, case, sinks)
    gradients = torch.autograd.grad(output, states, upstream)
    want = exact(doubles, case, sinks)
    wanted = torch.autograd.grad(want, doubles, upstream.double())

    def error(got: torch.Tensor, true: torch.Tensor) -> float:
        # In a window of one, the gradients of queries and keys are zero.
        return ((got.double() - true).norm() / (true.norm() or upstream.norm())).item()

    # `all`, because `max` skips NaN behind the first element.
    assert all(error(a, b) < tolerance for a, b in zip((output, *gradients), (want, *wanted), strict=True))
    rolled = exact([doubles[0], doubles[1].roll(1, dims=0), doubles[2]], case, sinks)
    assert max(case.keys) == 1 or case.window == 1 or error(output, rolled) > 5 * tolerance
    if "deterministic" in case.asked:
        for _ in range(5):
            again = torch.autograd.grad(kernel(states, case, sinks), states, upstream)
            assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))
