"""
Differentiable all-to-all and all-gather over a context-parallel group.

Both are built from one collective, all-to-all. Two rules make gradients exact: one for values that the processes
compute in parts, and one for values that every process computes in full.

- Inside of the network the backward of an all-to-all is the reverse all-to-all, and gradients of copies are summed.
- The all-gather before the loss is different: every process computes the same loss, so backward takes the local slice
  times the group size. The mean over processes, which DDP and FSDP compute, is then the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed


if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["AllToAll", "Exchange", "Group", "even_split", "exchange"]

AllToAll = Callable[[torch.Tensor, list[int], list[int]], torch.Tensor]
"""Sends the parts of a flat tensor, and returns the parts of all processes: `(sent, send_sizes, receive_sizes)`."""


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
    def of(cls, group: distributed.ProcessGroup | None = None) -> Self:
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

    def all_equal(self, numbers: Sequence[int | torch.Tensor], device: torch.device | str) -> bool:
        """Whether all processes have the same integers, which may be tensors on `device`. The host waits."""
        local = torch.stack([torch.as_tensor(n, device=device) for n in numbers])
        # One all-reduce(MAX) of x and -x gives maximum and minimum: all processes agree if these are equal.
        extremes = torch.cat([local, -local])
        distributed.all_reduce(extremes, distributed.ReduceOp.MAX, group=self.group)
        maximum, minus_minimum = extremes.chunk(2)
        return bool((maximum == -minus_minimum).all())


def exchange(
    parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], all_to_all: AllToAll
) -> list[list[torch.Tensor]]:
    """
    Send the tensors `parts[i]` to process `i`; return the tensors that process `i` sent, which have `shapes[i]`.

    One all-to-all for all of them: a collective costs its latency, and compilers may change the order of several.
    """
    sizes = [[_numel(shape) for shape in of_rank] for of_rank in shapes]
    # One flat buffer per direction: `all_to_all_single` takes tensors of different sizes, gloo has no `all_to_all`.
    sent = torch.cat([x.reshape(-1) for of_rank in parts for x in of_rank])
    received = all_to_all(
        sent, [sum(x.numel() for x in of_rank) for of_rank in parts], [sum(of_rank) for of_rank in sizes]
    )
    flat = iter(received.split([*chain(*sizes)]))
    # Under autocast keys may be in float32 and values in half precision, and the buffer has the wider of both.
    return [
        [next(flat).view(shape).to(x.dtype) for x, shape in zip(parts[0], of_rank, strict=True)] for of_rank in shapes
    ]


class Exchange(NamedTuple):
    """
    How the processes of a group exchange local tokens for local heads; a tuple, which compilers can trace.

    Attributes:
        rank (`int`): Rank of this process.
        tokens_per_rank (`Sequence[int]`): Number of tokens of each process; `t` of this process, `T` in total.
        all_to_all (`Callable`): The collective.
    """

    rank: int
    tokens_per_rank: Sequence[int]
    all_to_all: AllToAll

    def tokens_to_heads(self, states: Sequence[torch.Tensor], heads: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """
        Each of the `states`, `(t, N, ...)` to `(T, n, ...)` in the order of the packed row, in one all-to-all.

        Rank i gets `heads[k][i]` heads of `states[k]`.
        """
        split = [x.split(list(of_ranks), dim=1) for x, of_ranks in zip(states, heads, strict=True)]
        local_heads = [of_ranks[self.rank] for of_ranks in heads]
        shapes = [
            [(t, n, *x.shape[2:]) for x, n in zip(states, local_heads, strict=True)] for t in self.tokens_per_rank
        ]
        received = exchange([*zip(*split, strict=True)], shapes, self.all_to_all)
        return [torch.cat(x) for x in zip(*received, strict=True)]

    def heads_to_tokens(self, x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """All-to-all from local heads to local tokens, `(T, n, ...)` in the order of the row to `(t, N, ...)`."""
        shapes = [[(self.tokens_per_rank[self.rank], n, *x.shape[2:])] for n in heads]
        received = exchange([[part] for part in x.split(list(self.tokens_per_rank))], shapes, self.all_to_all)
        return torch.cat([part for (part,) in received], dim=1)

    def around(self, attend: Callable[..., torch.Tensor], states: list[torch.Tensor]) -> torch.Tensor:
        """
        Attention `attend(query, key, value)` for the `states` of the local tokens, with the communication around it.

        Queries, keys and values are `(t, N, D)`; `attend` gets them for all tokens with the local heads.
        """
        processes = len(self.tokens_per_rank)
        query, *kv = states
        copies = _copies_of_kv_heads(query.shape[1], kv[0].shape[1], processes)
        if copies > 1:
            kv = [x.repeat_interleave(copies, dim=1) for x in kv]
        states = [query, *kv]
        heads = [even_split(x.shape[1], processes) for x in states]
        return self.heads_to_tokens(attend(*self.tokens_to_heads(states, heads)), heads[0])


def _copies_of_kv_heads(heads: int, kv_heads: int, size: int) -> int:
    """
    How often KV heads are repeated, so that each of `size` processes has query heads with their KV heads.

    Example: 8 query heads, 2 KV heads and 4 processes: 2 copies make 4 KV heads, one per process with 2 query heads.

    ```python
    >>> _copies_of_kv_heads(8, 2, 4)
    2

    ```
    """
    for copies in range(1, heads // kv_heads + 1):
        if heads % (kv_heads * copies) == 0 and kv_heads * copies % size == 0:
            return copies
    return heads // kv_heads  # one KV head per query head, whose numbers per process may differ by one


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:  # not `torch.Size(shape).numel()`: sizes are symbols while a layer is compiled
        size = size * n
    return size


def _all_to_all(
    group: distributed.ProcessGroup | None, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]
) -> torch.Tensor:
    received = sent.new_empty(sum(receive_sizes))
    distributed.all_to_all_single(received, sent.contiguous(), receive_sizes, send_sizes, group=group)
    return received


class _AllGatherForLoss(torch.autograd.Function):
    """All-gather; backward takes the local slice of the gradient, times the group size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, lengths: tuple[int, ...]) -> torch.Tensor:
        ctx.group, ctx.lengths = group, lengths
        shapes = [[(n, *x.shape[1:])] for n in lengths]
        received = exchange([[x]] * group.size, shapes, partial(_all_to_all, group.group))
        return torch.cat([x for (x,) in received])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        group = ctx.group
        # Times the size, because DDP and FSDP divide by it when they average the gradients of the processes.
        return grads[0].split(ctx.lengths)[group.rank] * group.size, None, None
