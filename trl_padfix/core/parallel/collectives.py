"""
What the processes of a group tell each other about a packed row of which each computes a part, with exact gradients.

All of it is one collective, an exchange in which each process has something for each other one. Two rules make
gradients exact, whatever is computed in parts and whatever by everyone:

- within the network the backward of an exchange is the exchange back, and what was copied is summed;
- at the exit, where every process computes the same loss from what it was told, the gradient is the own part times the
  number of processes: *the mean over all processes*, as DDP and FSDP take it, *is the gradient of the loss*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


__all__ = ["Group", "even"]


def even(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True)
class Group:
    """
    Processes that compute one packed row.

    Attributes:
        group (`torch.distributed.ProcessGroup`): The processes.
        rank (`int`): Which of them this one is.
        size (`int`): How many there are.
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any = None) -> Group:
        """The processes of `group`; all of them, if it is `None`."""
        group = distributed.group.WORLD if group is None else group
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    def __deepcopy__(self, memo: dict) -> Group:
        return self  # a process group is not copied with the model that knows it

    def dealt(self, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """`parts[i]` goes to process `i`; from process `i` comes what has `shapes[i]`."""
        return list(_Exchange.apply(self, tuple(shapes), *parts))

    def gathered(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The parts of all processes in their order, `(t, ...)` to `(T, ...)`, within the network."""
        return torch.cat(self.dealt([x] * self.size, [(n, *x.shape[1:]) for n in lengths]))

    def told(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The parts of all processes in their order, `(t, ...)` to `(T, ...)`, for a loss that each computes whole."""
        return _Told.apply(x, self, tuple(lengths))

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all processes of gradients that each has of its own part."""
        x = x.clone()
        distributed.all_reduce(x, group=self.group)
        return x / self.size

    def agree(self, numbers: Sequence[Any], device: Any) -> bool:
        """Whether all processes have the same integers, perhaps on the `device`; the host waits for the answer."""
        own = torch.stack([torch.as_tensor(n, device=device) for n in numbers])
        own = torch.cat([own, -own])
        distributed.all_reduce(own, distributed.ReduceOp.MAX, group=self.group)
        most, least = own.chunk(2)
        return bool((most == -least).all())


def _exchange(group: Group, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    out = parts[0].new_empty(sum(sizes))
    flat = torch.cat([part.reshape(-1) for part in parts])
    distributed.all_to_all_single(out, flat, sizes, [part.numel() for part in parts], group=group.group)
    return [x.view(shape) for x, shape in zip(out.split(sizes), shapes, strict=True)]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: Group, shapes: tuple[tuple[int, ...], ...], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.shapes = group, [tuple(part.shape) for part in parts]
        return tuple(_exchange(group, parts, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, *_exchange(ctx.group, grads, ctx.shapes)


class _Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.lengths = group, lengths
        return torch.cat(_exchange(group, [x] * group.size, [(n, *x.shape[1:]) for n in lengths]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        group = ctx.group
        return grads[0].split(ctx.lengths)[group.rank] * group.size, None, None
