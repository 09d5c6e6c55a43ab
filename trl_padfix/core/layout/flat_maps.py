"""
Index maps and lengths on the host and on a device: [`FlatIndexMaps`] moves all maps of a batch in one transfer,
[`SegmentLengths`] holds both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch


__all__ = ["FlatIndexMaps", "SegmentLengths", "cu_seqlens_of", "inverse_permutation", "to_device_async"]

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


@dataclass(frozen=True, eq=False)
class FlatIndexMaps(Generic[T]):
    """
    Dataclasses whose index maps are concatenated to one int64 vector.

    There is then one tensor to send between processes and to upload. A map that occurs twice is stored once,
    and is one tensor again after [`FlatIndexMaps.to`].

    Attributes:
        block (`torch.Tensor` of shape `(n,)`, int64):
            All maps, one after the other.
        parts (`tuple[tuple[int, torch.dtype], ...]`):
            Length and dtype of each map.
        value:
            The dataclasses, with a [`_MapSlot`] in the place of each map.

    Example:

    ```python
    >>> import torch

    >>> flat = FlatIndexMaps.of({"a": torch.tensor([3, 4]), "b": torch.tensor([5], dtype=torch.int32)})
    >>> flat.block, flat.parts
    (tensor([3, 4, 5]), ((2, torch.int64), (1, torch.int32)))
    >>> flat.to("cpu")
    {'a': tensor([3, 4]), 'b': tensor([5], dtype=torch.int32)}

    ```
    """

    block: torch.Tensor
    parts: tuple[tuple[int, torch.dtype], ...]
    value: Any

    @classmethod
    def of(cls, value: T) -> FlatIndexMaps[T]:
        """Flatten a dataclass, or a dictionary of dataclasses; their tensors are vectors of integers."""
        maps: dict[int, torch.Tensor] = {}

        def slot(x: torch.Tensor) -> _MapSlot:
            # By identity: the `cu_seqlens` of queries and keys may be one tensor, and must stay one.
            maps.setdefault(id(x), x)
            return _MapSlot(list(maps).index(id(x)))

        with_slots = _replaced(value, torch.Tensor, slot)
        block = torch.cat([x.to(torch.int64) for x in maps.values()])
        return cls(block, tuple((x.numel(), x.dtype) for x in maps.values()), with_slots)

    def pin_memory(self) -> FlatIndexMaps[T]:
        """The same maps in page-locked memory: the data loader calls this method for the prefix plan of a step."""
        return replace(self, block=self.block.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> T:
        """The dataclasses, with their tensors on `device`: one transfer, for which the host never waits."""
        sections = to_device_async(self.block, device).split([length for length, _ in self.parts])
        maps = [section.to(dtype) for section, (_, dtype) in zip(sections, self.parts, strict=True)]
        return _replaced(self.value, _MapSlot, lambda slot: maps[slot.number])


@dataclass(frozen=True)
class _MapSlot:
    """Stands for the map with this number in the block."""

    number: int


def _replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Replace objects of a `kind` in the fields of dataclasses and the values of dictionaries, at any depth."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        return {k: _replaced(v, kind, by) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _replaced(getattr(value, f.name), kind, by) for f in fields(value)})
    return value
