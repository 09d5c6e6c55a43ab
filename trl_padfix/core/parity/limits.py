"""
Limits of the parity checks: how far rounding alone can move two computations of the same numbers apart.

The same kernels on the same shapes round equally: between such computations only the dtype of the weights counts.
Others round differently: their limit is derived from the size of the model, or it is measured, with two computations
that are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn


__all__ = ["DEVIATIONS", "OF_NOISE", "TIMES_ROUNDING", "Limits", "lowest_dtype", "precision_of", "tolerance"]

DEVIATIONS = 8
"""Standard deviations of one computation. Both round, so 8 are 5.7 deviations of their difference: one in 10**8
draws."""

TIMES_ROUNDING = 3
"""Two computations may differ by this many times the difference of two that are right."""

WIDEST_SCORE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Largest difference of a score that passes unmeasured, however large the model is; a tenth of it for the mean."""

WIDEST_GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The same for a gradient, relative to its norm."""

STEP = (2e-5, 1e-4)
"""Relative differences of the loss and the gradient of a step that pass unmeasured, in float32 and float64."""

HALF_STEP = (0.25, 2.0)
"""The same in half precision, in units of the dtype's epsilon."""


NOISE, HALF_NOISE = 0.02, 0.2
"""
Relative differences by rounding, in float32 and in half precision, above which a gradient is nothing but rounding.
GRPO has such gradients where all completions of a prompt have the same reward: only the KL term is left, and its
gradient is zero but for rounding.
"""

OF_NOISE = 10
"""Relative difference of two such gradients that passes."""


def tolerance(size: float, *, terms: float, depth: int = 1, dtype: torch.dtype = torch.float32) -> float:
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
        terms (`float`):
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


class Limits(NamedTuple):
    """
    The largest differences: of a mean (a loss), of a gradient relative to its norm, and of one score.

    How [`check_parity`] measures them:

    - **Snippets**: up to four. If the decoder has scans that compute chunks of tokens at once, two of them cross from
      one chunk to the next, provided that rows of the batch are long enough.
    - **Longest row** (with `gradients`): errors of long rows do not show in short ones. It runs packed after another
      row, and alone; up to `MAX_COLUMNS` of its scores are compared, and no gradient. With context parallelism, up to
      `LONG_ROW_TOKENS` tokens of it are distributed over the processes instead.
    - **Gradient**: of the sum of the scores, summed for each token id, so it has passed the backward of every layer.
      It costs a backward for each forward, and the memory of the activations.
    - **Float64 and float32**: the limits follow from the size of the model.
    - **Half precision** (also under autocast, and in TF32): the same rows run through the padded model once more, with
      another attention function (`eager` for `sdpa`). Packed and padded may differ by 3 times the difference of these
      two padded forwards. A fixed limit would fail: rounding depends on depth and weights, so it would accept a token
      that sees another row in one model, and reject correct results of another.
    - **Each row alone**: without padding and neighbors. It is computed in float64 if the model is in float32, or has
      recurrent layers that start from shared prefixes; if its code allows it; and on a CPU if its weights are few. To
      measure rounding, the rows also run in the model's own precision, and three times with weights one rounding away.
    - **Images**: a batch with images cannot be cut into snippets. All its rows run twice, and the scores of up to
      `MAX_COLUMNS` columns are compared.
    - **Images, FSDP, DeepSpeed**: gradients, the longest row (except with context parallelism) and rows alone are left
      out, and the report says so. There, any difference is an error.
    """

    mean: float
    gradient: float
    maximum: float = math.inf

    def allow(self, mean: float, gradient: float) -> bool:
        """Whether these differences are within the limits; a NaN never is."""
        return mean <= self.mean and gradient <= self.gradient

    @classmethod
    def of_scores(
        cls, dtype: torch.dtype, rounding: torch.Tensor, of_gradient: float, *, size: float, terms: float, depth: int
    ) -> Limits:
        """
        The limits of differences of scores and of their gradient.

        `rounding`, `(n,)`, are the differences of the scores of two computations that are right, or zeros where none
        is measured, and `of_gradient` is the difference of their gradients. The limits are [`TIMES_ROUNDING`] times
        the mean and the gradient, and twice [`TIMES_ROUNDING`] times the largest, with a floor:

        - In float64 and float32 [`tolerance`] of float32, in which layers of any dtype compute norms and angles, and
          at most [`WIDEST_SCORE`]. Recurrent layers amplify rounding beyond it; where that cannot be measured, `terms`
          is infinite, and the floor the widest. For gradients, of size 1, the depth is twice as much.
        - In half precision sums are kept in float32, results are stored in half, and the errors of stored states
          depend on depth and weights: they are measured. A shallow model may round equally in both computations. So
          the floor is one rounding at storage (`terms=1`): of a log-probability of 4 (a token of 2 percent) for the
          largest difference, and one standard deviation at size 1 for the mean.

        The mean of many differences is one standard deviation, the largest is [`DEVIATIONS`] of them. For few scores
        both are estimates, so the limit of the mean is wider: twice for 8 scores, by 5 percent for 160.
        """
        few = 1 + DEVIATIONS / max(len(rounding), 1)
        gradient = tolerance(1, terms=1, dtype=dtype)
        if dtype in WIDEST_SCORE:
            maximum = min(WIDEST_SCORE[dtype], tolerance(size, terms=terms, depth=depth))
            mean = min(few * maximum / DEVIATIONS, WIDEST_SCORE[dtype] / 10)
            gradient = min(WIDEST_GRADIENT[dtype], tolerance(1, terms=terms, depth=2 * depth))
        else:
            maximum, mean = tolerance(4, terms=1, dtype=dtype), tolerance(1, terms=1, dtype=dtype) / DEVIATIONS
        times = TIMES_ROUNDING * few
        return cls(
            max(times * rounding.mean().item(), mean),
            max(TIMES_ROUNDING * of_gradient, gradient),
            max(2 * times * rounding.max().item(), maximum),
        )

    @classmethod
    def of_step(cls, dtype: torch.dtype, rounding: Iterable[tuple[float, float]] = ()) -> Limits:
        """
        The limits of relative differences of the loss and the gradient of a step.

        They are fixed, or [`TIMES_ROUNDING`] times the largest `rounding`: differences of two steps that are right. A
        gradient that is nothing but rounding ([`NOISE`]) has the limit [`OF_NOISE`].
        """
        is_half, eps = dtype.itemsize <= 2, torch.finfo(dtype).eps
        fixed = [times * eps for times in HALF_STEP] if is_half else STEP
        measured = ([TIMES_ROUNDING * x for x in differences] for differences in rounding)
        mean, gradient = map(max, zip(fixed, *measured, strict=True))
        is_noise = gradient > TIMES_ROUNDING * (HALF_NOISE if is_half else NOISE)
        return cls(mean, OF_NOISE if is_noise else gradient)


def lowest_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of lowest precision among the weights of a module; quantized ones have none."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point() and p.dtype.itemsize > 1}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def precision_of(module: nn.Module, device: torch.device) -> torch.dtype:
    """The precision of a forward: autocast dtype, else dtype of the weights; float16 for TF32, which rounds alike."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    dtype = lowest_dtype(module)
    return torch.float16 if device.type == "cuda" and dtype == torch.float32 and multiplies_in_tf32() else dtype


def multiplies_in_tf32() -> bool:
    """Whether GPUs multiply float32 matrices in TF32."""
    matmul = torch.backends.cuda.matmul
    # torch 2.9 has two settings. Reading the older one raises an error if the newer one was set, which transformers
    # does for `tf32=True`.
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
