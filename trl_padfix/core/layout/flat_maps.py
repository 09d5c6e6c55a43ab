"""Index maps on their way to a device: [`FlatIndexMaps`] takes all of a batch there in one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import torch


__all__ = ["FlatIndexMaps", "cu_seqlens_of", "to_device_async"]


def cu_seqlens_of(lengths: Iterable[int]) -> torch.Tensor:
    """Where parts of these lengths begin and end, `(n + 1,)`, int32: `cu_seqlens` of variable-length kernels."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def to_device_async(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on `device`; where it comes from the host, the host does not wait for its arrival."""
    if torch.device(device).type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class FlatIndexMaps:
    """
    The index maps in dataclasses in one int64 vector: one tensor to hand between processes, to pin and to upload.

    `parts` are length and dtype of each map, and `value` is what was given, with a [`_Part`] in the place of each map.
    What is one object stays one.
    """

    block: torch.Tensor
    parts: tuple[tuple[int, torch.dtype], ...]
    value: Any

    @classmethod
    def of(cls, value: Any) -> FlatIndexMaps:
        """The maps of a dataclass, or a dictionary of such; their tensors are vectors of integers."""
        found: dict[int, torch.Tensor] = {}

        def part(x: torch.Tensor) -> _Part:
            found.setdefault(id(x), x)
            return _Part(list(found).index(id(x)))

        left = _replaced(value, torch.Tensor, part)
        block = torch.cat([x.to(torch.int64) for x in found.values()])
        return cls(block, tuple((x.numel(), x.dtype) for x in found.values()), left)

    def pin_memory(self, device: Any = None) -> FlatIndexMaps:
        """The same in page-locked memory; the data loader calls it."""
        return replace(self, block=self.block.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """What was given, its tensors on `device`: one transfer, for which the host does not wait in any case."""
        sections = to_device_async(self.block, device).split([length for length, _ in self.parts])
        maps = [section.to(dtype) for section, (_, dtype) in zip(sections, self.parts, strict=True)]
        return _replaced(self.value, _Part, lambda part: maps[part.number])


@dataclass(frozen=True)
class _Part:
    number: int


def _replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """`value` with what is of a kind replaced, in the fields of dataclasses and the values of dictionaries."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        return {k: _replaced(v, kind, by) for k, v in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _replaced(getattr(value, f.name), kind, by) for f in fields(value)})
    return value
