"""
Index maps and lengths on the host and on a device: [`move_maps`] moves all maps of a batch in one transfer,
[`SegmentLengths`] holds both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch


__all__ = ["SegmentLengths", "cu_seqlens_of", "inverse_permutation", "move_maps", "to_device_async"]

T = TypeVar("T")


def cu_seqlens_of(lengths: Iterable[int]) -> torch.Tensor:
    """
    Cumulative lengths, `(n + 1,)`, int32: the `cu_seqlens` of variable-length kernels.

    Example:

    ```python
    >>> cu_seqlens_of([2, 3])
    tensor([0, 2, 5], dtype=torch.int32)

    ```
    """
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    """
    Index that undoes `order`: `x[order][inverse_permutation(order)]` is `x`.

    Args:
        order (`torch.Tensor` of shape `(n,)`):
            The integers from 0 to `n - 1`, in any order.

    Returns:
        `torch.Tensor` of shape `(n,)`: the place of each integer in `order`.

    Example: token 0 is computed by rank 1, tokens 1 and 2 by rank 0.

    ```python
    >>> import torch

    >>> rank_order = torch.tensor([1, 0, 0]).argsort(stable=True)
    >>> rank_order, inverse_permutation(rank_order)
    (tensor([1, 2, 0]), tensor([2, 0, 1]))

    ```
    """
    # The sorted values are 0, 1, 2, ..., so the index that sorts is the place of each value.
    return order.argsort()


def to_device_async(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to `device`. The host does not wait for a copy from host to device."""
    # Only copies from page-locked memory are asynchronous.
    if torch.device(device).type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class SegmentLengths:
    """
    Lengths of the segments of a packed row, on the host and on the device of the row.

    Attributes:
        lengths (`tuple[int, ...]` of length `S`):
            The lengths.
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`, int32):
            Cumulative lengths: where each segment begins, and where the last one ends.
    """

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> SegmentLengths:
        """The same lengths on the host and on `device`, for which the host does not wait."""
        return cls(tuple(lengths), to_device_async(cu_seqlens_of(lengths), device))

    @cached_property
    def longest(self) -> int:
        """Length of the longest segment: flash-attn's `max_seqlen`."""
        return max(self.lengths)


def move_maps(value: T, device: torch.device | str) -> T:
    """
    A dataclass, or a dictionary of dataclasses, with its index maps (vectors of integers) on `device`.

    All maps move in one transfer, for which the host never waits. A map that occurs twice is one tensor again.

    Example:

    ```python
    >>> import torch

    >>> move_maps({"a": torch.tensor([3, 4]), "b": torch.tensor([5], dtype=torch.int32)}, "cpu")
    {'a': tensor([3, 4]), 'b': tensor([5], dtype=torch.int32)}

    ```
    """
    maps: dict[int, torch.Tensor] = {}
    # By identity: the `cu_seqlens` of queries and keys may be one tensor, and must stay one.
    _replace_tensors(value, lambda x: maps.setdefault(id(x), x))
    block = to_device_async(torch.cat([x.to(torch.int64) for x in maps.values()]), device)
    sections = block.split([x.numel() for x in maps.values()])
    moved = {i: section.to(x.dtype) for (i, x), section in zip(maps.items(), sections, strict=True)}
    return _replace_tensors(value, lambda x: moved[id(x)])


def _replace_tensors(value: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in the fields of dataclasses and the values of dictionaries, at any depth."""
    if isinstance(value, torch.Tensor):
        return by(value)
    if isinstance(value, dict):
        return {k: _replace_tensors(v, by) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _replace_tensors(vars(value)[f.name], by) for f in fields(value)})
    return value
