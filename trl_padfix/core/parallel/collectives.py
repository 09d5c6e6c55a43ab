"""
Differentiable all-to-all and all-gather over a context-parallel group.

Both are built from one collective, all-to-all. Two rules make gradients exact, for values that each process computes a
part of and for values that all compute:

- Inside of the network the backward of an all-to-all is the all-to-all back, and gradients of copies are summed.
- The all-gather before the loss is different: every process computes the same loss, so backward takes the local slice
  times the group size. The mean over processes, which DDP and FSDP compute, is then the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


__all__ = ["Group", "even_split"]


def even_split(total: int, parts: int) -> list[int]:
    """
    `total` as a sum of `parts` numbers that differ by at most one, the larger first.

    Example:

    ```python
    >>> even_split(8, 3)
    [3, 3, 2]

    ```
    """
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True)
class Group:
    """
    Processes that compute one packed row.

    Attributes:
        group (`torch.distributed.ProcessGroup`): The processes.
        rank (`int`): Rank of this process in the group.
        size (`int`): Number of processes.
    """

    group: distributed.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: distributed.ProcessGroup | None = None) -> Group:
        """The processes of `group`; all processes if it is `None`."""
        group = distributed.group.WORLD if group is None else group
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # a model can be copied, a process group cannot

    def all_to_all(self, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Send `tensors[i]` to process `i`; return what process `i` sent, of `shapes[i]`."""
        return list(_AllToAll.apply(self, tuple(shapes), *tensors))

    def all_gather(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """
        Concatenate the tensors of all processes in rank order, `(t, ...)` to `(T, ...)`, inside of the network.

        `lengths` are the `t` of all processes. Backward is a reduce-scatter.
        """
        return torch.cat(self.all_to_all([x] * self.size, [(n, *x.shape[1:]) for n in lengths]))

    def all_gather_for_loss(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenate the tensors of all processes in rank order, for a loss that every process computes in full."""
        return _AllGatherForLoss.apply(x, self, tuple(lengths))

    def all_reduce_mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, as DDP computes it for gradients."""
        x = x.clone()  # `all_reduce` writes to its argument
        distributed.all_reduce(x, group=self.group)
        return x / self.size

    def all_equal(self, numbers: Sequence[int | torch.Tensor], device: torch.device | str) -> bool:
        """Whether all processes have the same integers, which may be tensors on `device`. The host waits."""
        local = torch.stack([torch.as_tensor(n, device=device) for n in numbers])
        # One all-reduce(MAX) of x and -x gives maximum and minimum: all processes agree if these are equal.
        extremes = torch.cat([local, -local])
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=self.group)
        maximum, minus_minimum = extremes.chunk(2)
        return bool((maximum == -minus_minimum).all())


def _all_to_all(
    group: Group, tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    # One flat buffer per direction: `all_to_all_single` takes tensors of different sizes, gloo has no `all_to_all`.
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = tensors[0].new_empty(sum(sizes))
    sent = torch.cat([x.reshape(-1) for x in tensors])
    distributed.all_to_all_single(received, sent, sizes, [x.numel() for x in tensors], group=group.group)
    return [x.view(shape) for x, shape in zip(received.split(sizes), shapes, strict=True)]


class _AllToAll(torch.autograd.Function):
    """All-to-all; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, group: Group, shapes: tuple[tuple[int, ...], ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.shapes = group, [tuple(x.shape) for x in tensors]
        return tuple(_all_to_all(group, tensors, shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return None, None, *_all_to_all(ctx.group, grads, ctx.shapes)


class _AllGatherForLoss(torch.autograd.Function):
    """All-gather; backward takes the local slice of the gradient, times the group size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.lengths = group, lengths
        return torch.cat(_all_to_all(group, [x] * group.size, [(n, *x.shape[1:]) for n in lengths]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        group = ctx.group
        # Times the size, because DDP and FSDP divide by it when they average the gradients of the processes.
        return grads[0].split(ctx.lengths)[group.rank] * group.size, None, None
