"""Limits of the parity check: how far rounding alone can move two computations of the same numbers apart."""

from __future__ import annotations

import math

import torch


__all__ = ["DEVIATIONS", "TIMES_ROUNDING", "gradient_limit", "score_limits", "tolerance"]

DEVIATIONS = 8
"""Standard deviations of one computation. Both round, so 8 are 5.7 deviations of their difference: one in 10**8
draws."""

TIMES_ROUNDING = 3
"""Two computations may differ by this many times the difference of two that are right."""

WIDEST_SCORE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Largest difference of a score that passes unmeasured, however large the model is; a tenth of it for the mean."""

WIDEST_GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The same for a gradient, relative to its norm."""


def tolerance(size: float, *, terms: int, depth: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """
    The largest difference that rounding explains between two computations of one number.

    One operation on numbers of `size` rounds by at most `u * size`, with `u = eps / 2` of the dtype. Errors of a sum
    are as often up as down, so that errors of `terms` summands add up to `sqrt(terms) * u * size` (Higham and Mary,
    "A new approach to probabilistic rounding error analysis", 2019), and errors of `depth` such sums in sequence
    (layers, steps) to `sqrt(depth)` times as much. [`DEVIATIONS`] times that is allowed. Kernel, order of summation,
    number of threads and fused multiplication do not matter: they only choose another order.

    Args:
        size (`float`):
            The largest magnitude that is summed: of the compared values, or of the values that they are differences of
            (logits, for log-probabilities).
        terms (`int`):
            Length of the longest sum: hidden size, vocabulary, keys of a query, tokens of a mean.
        depth (`int`, *optional*, defaults to 1):
            Sums in sequence: about eight in a layer forward, twice as many with its backward, times steps.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            The lowest precision on the way. Many models compute norms and rotary angles in float32 for any dtype.

    Example:

    ```python
    >>> f"{tolerance(28, terms=32, depth=3 * 8):.1e}", f"{tolerance(1, terms=32, dtype=torch.float64):.1e}"
    ('3.7e-04', '5.0e-15')

    ```
    """
    return DEVIATIONS * torch.finfo(dtype).eps / 2 * size * math.sqrt(terms * depth)


def score_limits(
    dtype: torch.dtype, rounding: torch.Tensor, *, size: float, terms: int, depth: int, widest: bool = False
) -> tuple[float, float]:
    """
    Largest allowed mean difference and largest allowed single difference of scores.

    `rounding`, `(n,)`, are the differences of two computations that are right, or zeros where none is measured:
    The limits are [`TIMES_ROUNDING`] times their mean and twice [`TIMES_ROUNDING`] times their maximum, with a floor:

    - In float64 and float32 [`tolerance`] of float32, in which layers of any dtype compute norms and angles, and at
      most [`WIDEST_SCORE`]. Recurrent layers amplify rounding beyond it; where that cannot be measured the floor is
      the `widest`.
    - In half precision sums are kept in float32, results are stored in half, and the errors of stored states depend on
      depth and weights: they are measured. A shallow model may round equally in both computations. So the floor is one
      rounding at storage (`terms=1`): of a log-probability of 4 (a token of 2 percent) for the largest difference, and
      one standard deviation at size 1 for the mean.

    The mean of many differences is one standard deviation, the largest is [`DEVIATIONS`] of them. For few scores both
    are estimates, so the limit of the mean is wider: twice for 8 scores, by 5 percent for 160.
    """
    few = 1 + DEVIATIONS / max(len(rounding), 1)
    if dtype in WIDEST_SCORE:
        derived = math.inf if widest else tolerance(size, terms=terms, depth=depth)
        largest_floor = min(derived, WIDEST_SCORE[dtype])
        mean_floor = min(few * largest_floor / DEVIATIONS, WIDEST_SCORE[dtype] / 10)
    else:
        largest_floor, mean_floor = tolerance(4, terms=1, dtype=dtype), tolerance(1, terms=1, dtype=dtype) / DEVIATIONS
    times = TIMES_ROUNDING * few
    return max(times * rounding.mean().item(), mean_floor), max(2 * times * rounding.max().item(), largest_floor)


def gradient_limit(dtype: torch.dtype, rounding: float, *, terms: int, depth: int, widest: bool = False) -> float:
    """
    Largest allowed difference of a gradient, relative to its norm.

    As [`score_limits`], of size 1: [`tolerance`] with twice the depth, for the backward, or one rounding at storage.
    """
    floor = tolerance(1, terms=1, dtype=dtype)
    if dtype in WIDEST_GRADIENT:
        derived = math.inf if widest else tolerance(1, terms=terms, depth=2 * depth)
        floor = min(derived, WIDEST_GRADIENT[dtype])
    return max(TIMES_ROUNDING * rounding, floor)
