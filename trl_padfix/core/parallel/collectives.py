"""
Differentiable all-to-all and all-gather over a context-parallel group.

Both are built from one collective, all-to-all. Two rules make gradients exact: one for values that the processes
compute in parts, and one for values that every process computes in full.

- Inside of the network the backward of an all-to-all is the reverse all-to-all, and gradients of copies are summed.
- The all-gather before the loss is different: every process computes the same loss, so backward takes the local slice
  times the group size. The mean over processes, which DDP and FSDP compute, is then the gradient of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import distributed


__all__ = ["Group", "even_split", "exchange"]


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

    def all_gather_for_loss(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenate the tensors of all processes in rank order, for a loss that every process computes in full."""
        return _AllGatherForLoss.apply(x, self, tuple(lengths))

    def all_reduce_mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over all processes, as DDP computes it for gradients."""
        x = x.clone()  # `all_reduce` writes to its argument
        distributed.all_reduce(x, group=self.group)
        return x / self.size

    def all_equal(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all processes have the same tensors of integers, but for rare collisions. The host waits."""
        # Checksums: one differs if sizes or the order of tensors differ; the other, on the device, if values differ.
        shapes, values = 0, tensors[0].new_zeros((), dtype=torch.int64)
        for i, x in enumerate(tensors, 1):
            # Sizes are multiplied by a prime that is larger than numbers of rows, so that the two do not cancel out.
            shapes += i * (len(x) + 65_537 * x.numel())
            # Weights by position, within a tensor and (`* 3`) among tensors. int64 may overflow, equally on all.
            values = values * 3 + (x.flatten().long() * (torch.arange(x.numel(), device=x.device) + 1)).sum()
        local = torch.stack([torch.full_like(values, shapes), values])
        # One all-reduce(MAX) of x and -x gives maximum and minimum: all processes agree if these are equal.
        extremes = torch.cat([local, -local])
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=self.group)
        maximum, minus_minimum = extremes.chunk(2)
        return bool((maximum == -minus_minimum).all())


def exchange(
    parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], group: Group
) -> list[list[torch.Tensor]]:
    """
    Send the tensors `parts[i]` to process `i`; return the tensors that process `i` sent, which have `shapes[i]`.

    One all-to-all for all of them: a collective costs its latency.
    """
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    # One flat buffer per direction: `all_to_all_single` takes tensors of different sizes, gloo has no `all_to_all`.
    sent = torch.cat([x.reshape(-1) for of_rank in parts for x in of_rank])
    received = _AllToAll.apply(
        sent, group.group, [sum(x.numel() for x in of_rank) for of_rank in parts], [sum(of_rank) for of_rank in sizes]
    )
    flat = iter(received.split([*chain(*sizes)]))
    # Under autocast keys may be in float32 and values in half precision, and the buffer has the wider of both.
    return [
        [next(flat).view(shape).to(x.dtype) for x, shape in zip(parts[0], of_rank, strict=True)] for of_rank in shapes
    ]


def _all_to_all(
    group: distributed.ProcessGroup | None, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]
) -> torch.Tensor:
    received = sent.new_empty(sum(receive_sizes))
    distributed.all_to_all_single(received, sent.contiguous(), receive_sizes, send_sizes, group=group)
    return received


class _AllToAll(torch.autograd.Function):
    """All-to-all of the parts of a flat tensor; backward is the reverse all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, sent: torch.Tensor, group: distributed.ProcessGroup | None, send_sizes: list[int],
        receive_sizes: list[int],
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.sizes = group, (receive_sizes, send_sizes)
        return _all_to_all(group, sent, send_sizes, receive_sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return _all_to_all(ctx.group, grads[0], *ctx.sizes), None, None, None


class _AllGatherForLoss(torch.autograd.Function):
    """All-gather; backward takes the local slice of the gradient, times the group size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.lengths = group, lengths
        received = exchange([[x]] * group.size, [[(n, *x.shape[1:])] for n in lengths], group)
        return torch.cat([x for (x,) in received])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        group = ctx.group
        # Times the size, because DDP and FSDP divide by it when they average the gradients of the processes.
        return grads[0].split(ctx.lengths)[group.rank] * group.size, None, None
