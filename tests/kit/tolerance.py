"""How far rounding alone can take two computations of the same numbers apart, and comparisons within that bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch


DEVIATIONS = 8
"""Standard deviations. Each of both computations errs: 5.7 of one stand for 8 of their difference, one in 10**8
draws."""

CONTROL = 10
"""A computation that is wrong on purpose must be off by this many tolerances."""


def tolerance(size: float, *, terms: int, depth: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """
    The largest difference that rounding explains between two computations of one number.

    One operation on numbers of `size` rounds by at most `u * size`, with `u = eps / 2` of the dtype. Errors of a
    sum are
    as often up as down, so that those of `terms` summands add up to `sqrt(terms) * u * size` (Higham and Mary,
    "A new
    approach to probabilistic rounding error analysis", 2019), and those of `depth` such sums behind one another
    (layers,
    steps) to `sqrt(depth)` times as much. [`DEVIATIONS`] of that are allowed. No kernel, order of summation,
    number of
    threads or fused multiplication enters: all of them only choose another order.

    Args:
        size (`float`):
            The largest magnitude that is summed: of the compared values, or of what they are differences
            of (logits, for
            log-probabilities).
        terms (`int`):
            Length of the longest sum: hidden size, vocabulary, keys of a query, tokens of a mean.
        depth (`int`, *optional*, defaults to 1):
            Sums behind one another: about eight in a layer forward, twice as many with its backward, times steps.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            The lowest precision on the way. Many models compute norms and rotary angles in float32,
            whatever theirs is.

    Example:

    ```python
    >>> f"{tolerance(28, terms=32, depth=3 * 8):.1e}", f"{tolerance(1, terms=32, dtype=torch.float64):.1e}"
    ('3.7e-04', '5.0e-15')

    ```
    """
    return DEVIATIONS * torch.finfo(dtype).eps / 2 * size * math.sqrt(terms * depth)


def rounding(exact: torch.Tensor, layers: int = 3) -> float:
    """[`tolerance`] of what a tiny model of `tests/zoo` computes: sums of at most 64 terms, eight in a layer."""
    return tolerance(float(exact.abs().max()), terms=64, depth=8 * layers)


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
    got: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    *,
    terms: int,
    depth: int = 1,
    dtype: torch.dtype = torch.float32,
    control: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """
    [`assert_close`] for the gradients of all parameters, in the norm of each.

    A gradient whose exact value is (nearly) zero, such as that of a key bias, is a difference of terms that
    cancel: the
    size of an error is that of the largest gradient of the model. At least one gradient of the `control` must be
    off.
    """
    assert got.keys() == exact.keys()
    size = max(float(g.norm()) for g in exact.values())
    allowed = tolerance(size, terms=terms, depth=depth, dtype=dtype)
    for name, gradient in exact.items():
        off = float((got[name].double() - gradient.double()).norm())
        assert off <= allowed, f"gradient of {name}: off by {off:.2e}; rounding explains {allowed:.2e}"
    if control is not None:
        off = max(float((control[name].double() - g.double()).norm()) for name, g in exact.items())
        assert off >= CONTROL * allowed, f"the control's gradients are off by {off:.2e}, and {allowed:.2e} is allowed"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; that of two NaN, or of two equal infinities, is 0."""
    a, b = a.double(), b.double()
    return float(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=math.inf).max())


def must_fail(compare: Callable[[], None]) -> None:
    """Assert that a comparison fails: its negative control."""
    try:
        compare()
    except AssertionError:
        return
    raise AssertionError("A computation that is wrong on purpose passed the comparison.")
