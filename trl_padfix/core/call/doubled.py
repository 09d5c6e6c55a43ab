"""
Tensors that are the same twice, one half after the other, and what is known of views of them.

What a tower answers for a batch that repeats its images is made of one half. A projector behind it is given a view of
that: that its halves are the same can be told from where it lies, without a look at the device.
"""

from __future__ import annotations

import weakref

import torch


__all__ = ["Doubled"]


class Doubled:
    """
    Tensors that were made of one half. They are not kept alive for it.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix.core.call.doubled import Doubled

    >>> doubled = Doubled()
    >>> twice = doubled.of(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    >>> twice[:, 0].tolist(), twice[:, 1:] in doubled
    ([1, 4, 1, 4], True)
    >>> twice[1:3] in doubled, twice.flip(0) in doubled
    (False, False)

    ```
    """

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[torch.Tensor], int]] = []

    def of(self, half: torch.Tensor) -> torch.Tensor:
        """`half` twice, one behind the other."""
        twice = torch.cat([half, half])
        if twice.is_contiguous() and not twice.is_inference():  # those of inference mode do not count their versions
            self._made.append((weakref.ref(twice), twice._version))
        return twice

    def __contains__(self, x: torch.Tensor) -> bool:
        """Whether `x` is one of these, or such a view that its halves lie in the halves of one, unchanged."""
        return any(t is not None and t._version == v and _halves_lie_alike(x, t) for t, v in self._alive())

    def _alive(self) -> list[tuple[torch.Tensor | None, int]]:
        return [(made(), version) for made, version in self._made]


def _halves_lie_alike(x: torch.Tensor, twice: torch.Tensor) -> bool:
    if x is twice:
        return True
    if x.is_inference() or x._base is not twice or x.dtype != twice.dtype or x.dim() == 0 or x.shape[0] % 2:
        return False
    rows, period = x.shape[0] // 2, twice.numel() // 2
    begin = x.storage_offset() - twice.storage_offset()
    end = begin + sum((n - 1) * stride for n, stride in zip((rows, *x.shape[1:]), x.stride(), strict=True))
    return rows > 0 and rows * x.stride(0) == period and 0 <= begin <= end < period
