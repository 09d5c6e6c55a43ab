"""
Comparisons within what rounding explains: `conformance.arbiter.tolerance`, which has the derivation.

`size` is the largest magnitude that is summed, `terms` the length of the longest sum (hidden size, vocabulary, keys of
a query), and `depth` the number of such sums behind one another: about eight in a layer, twice as many with backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from conformance.arbiter import CONTROL, tolerance


def rounding(exact: torch.Tensor) -> float:
    """[`tolerance`] of what a tiny model of `tests/zoo` computes: sums of 64 terms at most, eight in each layer."""
    return tolerance(float(exact.detach().abs().max()), terms=64, depth=8 * 3)


def assert_close(
    got: torch.Tensor,
    exact: torch.Tensor,
    *,
    terms: int,
    depth: int = 1,
    size: float | None = None,
    dtype: torch.dtype | None = None,
    control: torch.Tensor | None = None,
    what: str = "",
) -> None:
    """
    Assert that `got` is `exact` but for rounding, and that `control`, which is wrong on purpose, is not.

    `size` is by default the largest magnitude in `exact`; `dtype` the lower one of both tensors. The rest as in
    [`tolerance`].
    """
    got, exact = got.detach(), exact.detach()
    assert got.shape == exact.shape, f"{what}: shapes {tuple(got.shape)} and {tuple(exact.shape)}"
    if not exact.is_floating_point():  # counts
        assert torch.equal(got, exact), f"{what}: {got} is not {exact}"
        return
    dtype = dtype or min(got.dtype, exact.dtype, key=lambda t: torch.finfo(t).bits)
    size = float(exact.abs().max()) if size is None else size
    allowed = tolerance(size, terms=terms, depth=depth, dtype=dtype)
    off = distance(got, exact)
    assert off <= allowed, f"{what}: off by {off:.2e}; rounding explains {allowed:.2e} of values up to {size:.2e}"
    if control is not None:
        off = distance(control, exact)
        assert off >= CONTROL * allowed, f"{what}: the control is off by {off:.2e} only, and {allowed:.2e} is allowed"


def assert_gradients_close(
    got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], *, terms: int, depth: int = 1
) -> None:
    """
    [`assert_close`] for the gradients of all parameters, in the norm of each.

    A gradient whose exact value is (nearly) zero, such as that of a key bias, is a difference of terms that cancel:
    the size of an error is that of the largest gradient of the model.
    """
    assert got.keys() == exact.keys()
    size = max(float(g.norm()) for g in exact.values())
    allowed = tolerance(size, terms=terms, depth=depth)
    for name, gradient in exact.items():
        off = float((got[name].double() - gradient.double()).norm())
        assert off <= allowed, f"gradient of {name}: off by {off:.2e}; rounding explains {allowed:.2e}"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; that of two NaN, or of two equal infinities, is 0."""
    a, b = a.detach().double(), b.detach().double()
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=math.inf).max())
