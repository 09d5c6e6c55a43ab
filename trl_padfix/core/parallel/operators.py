"""
The all-to-all of context parallelism as an operator of torch, with gradients.

A compiler cannot trace a collective of a process group that the process has made. As an operator it is one node of the
graph, and its backward another. Importing this module registers it with torch; it is imported with the first exchange.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import distributed

from . import collectives
from .collectives import AllToAll


__all__ = ["all_to_all_of"]

_groups: dict[str, distributed.ProcessGroup | None] = {}
"""Process groups by name: an operator takes no objects."""


def all_to_all_of(group: distributed.ProcessGroup | None) -> AllToAll:
    """An all-to-all of flat tensors among the processes of a group, with gradients, which compilers can trace."""
    name = "" if group is None else group.group_name
    _groups[name] = group
    return partial(_all_to_all, name)


@torch.library.custom_op("trl_padfix::all_to_all", mutates_args=())
def _all_to_all(group: str, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
    return collectives._all_to_all(_groups[group], sent, send_sizes, receive_sizes)


@_all_to_all.register_fake
def _(group: str, sent: torch.Tensor, send_sizes: list[int], receive_sizes: list[int]) -> torch.Tensor:
    return sent.new_empty(sum(receive_sizes))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group, _, ctx.send_sizes, ctx.receive_sizes = inputs


def _backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
    return None, _all_to_all(ctx.group, upstream, ctx.receive_sizes, ctx.send_sizes), None, None


_all_to_all.register_autograd(_backward, setup_context=_save_for_backward)
