"""The limits of the parity check: derived from what is compared, never above what was fixed, wider where measured."""

from __future__ import annotations

import pytest
import torch

from trl_padfix.core.parity.limits import gradient_limit, score_limits


SIZES = {"terms": 128, "depth": 24}
NONE = torch.zeros(160)


def limits(dtype: torch.dtype, rounding: torch.Tensor = NONE, size: float = 5, **given: object) -> tuple[float, float]:
    return score_limits(dtype, rounding, size=size, **SIZES | given)


def test_in_float32_they_grow_with_size_and_length_of_the_sums_up_to_the_widest():
    mean, largest = limits(torch.float32)
    assert largest == pytest.approx(8 * 2**-24 * 5 * (128 * 24) ** 0.5)
    assert mean == pytest.approx(largest / 8 * 1.05)
    assert limits(torch.float32, size=10)[1] == limits(torch.float32, terms=512)[1] == 2 * largest
    assert limits(torch.float32, size=1e6) == limits(torch.float32, widest=True) == pytest.approx((1e-4, 1e-3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_floor_is_one_storing(dtype):
    epsilon = torch.finfo(dtype).eps
    assert limits(dtype) == (epsilon / 2, 16 * epsilon)
    assert gradient_limit(dtype, 0.0, **SIZES) == 4 * epsilon


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_measured_is_allowed_three_times(dtype):
    assert limits(dtype, NONE + 1) == pytest.approx((3 * 1.05, 6 * 1.05))
    assert limits(dtype, torch.ones(8)) == (6, 12)  # of few scores the measured rounding is itself an estimate
    assert gradient_limit(dtype, 1.0, **SIZES) == 3


def test_a_gradient_has_gone_twice_as_deep():
    assert gradient_limit(torch.float32, 0.0, **SIZES) == pytest.approx(8 * 2**-24 * (128 * 48) ** 0.5)
    assert gradient_limit(torch.float32, 0.0, **SIZES, widest=True) == 1e-3
