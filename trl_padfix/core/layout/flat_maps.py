"""
Index maps that a layout holds beside its own, and their way to a device.

[`sum_order`] is made on the host once for a batch, so that the backward of every layer can add the gradients of shared
tokens in one operation. [`FlatMaps`] takes the maps of a dataclass to a device in one transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch


__all__ = ["FlatMaps", "bounds_of", "on_device", "sum_order"]


def bounds_of(lengths: list[int]) -> torch.Tensor:
    """Where parts of these lengths begin and end, `(n + 1,)`, int32: `cu_seqlens` of variable-length kernels."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def sum_order(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The order in which to add what was gathered by `index` back to the `size` tokens that it came from.

    Args:
        index (`torch.Tensor` of shape `(n,)`):
            Tokens that were gathered, on the host.
        size (`int`):
            Tokens that there are.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: places in `index` sorted by token, `(n,)`, and where those of each token
        begin among them, `(size,)`. Both are what `torch.nn.functional.embedding_bag` takes.
    """
    order = torch.argsort(index, stable=True)
    counts = torch.bincount(index, minlength=size)
    return order, counts.cumsum(0) - counts


def on_device(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on `device`; where it comes from the host, the host does not wait for its arrival."""
    if torch.device(device).type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class FlatMaps:
    """
    The index maps of a dataclass in one block of memory: one tensor to hand between processes, to pin and to upload.

    Attributes:
        block (`torch.Tensor` of shape `(n,)`, int64): All maps, one behind the other.
        kind (`type`): The dataclass.
        parts (`tuple[tuple[int, torch.dtype, tuple[str, ...]], ...]`):
            Of each map its length, its dtype, and the fields that it stands in: what is one object stays one.
        others (`dict`): The fields that are no tensors.
    """

    block: torch.Tensor
    kind: type
    parts: tuple[tuple[int, torch.dtype, tuple[str, ...]], ...]
    others: dict[str, Any]

    @classmethod
    def of(cls, maps: Any) -> FlatMaps:
        """The maps of a dataclass whose tensors are vectors of integers."""
        values = {f.name: getattr(maps, f.name) for f in fields(maps)}
        names: dict[int, list[str]] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                names.setdefault(id(value), []).append(name)
        distinct = [values[places[0]] for places in names.values()]
        return cls(
            torch.cat([tensor.to(torch.int64) for tensor in distinct]),
            type(maps),
            tuple((t.numel(), t.dtype, tuple(at)) for t, at in zip(distinct, names.values(), strict=True)),
            {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)},
        )

    def pin_memory(self, device: Any = None) -> FlatMaps:
        """The same in page-locked memory; the data loader calls it."""
        return replace(self, block=self.block.pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """The dataclass with its tensors on `device`: one transfer, for which the host does not wait in any case."""
        values = dict(self.others)
        sections = on_device(self.block, device).split([length for length, _, _ in self.parts])
        for section, (_, dtype, names) in zip(sections, self.parts, strict=True):
            values |= dict.fromkeys(names, section.to(dtype))
        return self.kind(**values)
