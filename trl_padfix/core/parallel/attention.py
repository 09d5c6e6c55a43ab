"""
Context-parallel attention; see [`ContextParallelLayout`].

Around attention a process has its local tokens, `(1, N, t, D)`. It attends with some heads for all tokens
(Ulysses), and the layout stays the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..model.views import view_of
from .collectives import Group, even_split, exchange_around
from .layout import ContextParallelLayout


__all__ = ["attend_context_parallel"]


def attend_context_parallel(
    attend: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cp_layout: ContextParallelLayout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """
    Attention for the local tokens.

    Args:
        attend (`Callable`):
            Packed attention, called as `attend(module, query, key, value, layout, kwargs)`.
        module (`torch.nn.Module`):
            The attention module.
        query (`torch.Tensor` of shape `(1, N, t, D)`):
            Queries of the local tokens.
        key, value (`torch.Tensor` of shape `(1, K, t, D)`):
            Keys and values of the local tokens; `N` is a multiple of `K`.
        cp_layout ([`ContextParallelLayout`]):
            The packed row divided among the processes.
        kwargs (`dict`):
            Other arguments of the attention function.

    Returns:
        `torch.Tensor` of shape `(1, t, N, D)`.
    """

    def attend_received(*received: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in received)
        kv_groups = query.shape[1] // key.shape[1]
        local_module, local_kwargs = _with_local_heads(module, kwargs, kv_groups, cp_layout.group)
        return attend(local_module, query, key, value, cp_layout.layout, local_kwargs)[0]

    # Exchanged tensors have tokens first, attention has heads first.
    states = [x[0].transpose(0, 1) for x in (query, key, value)]
    return exchange_around(attend_received, states, cp_layout, cp_layout.group.size).unsqueeze(0)


def _with_local_heads(
    module: nn.Module, kwargs: dict[str, Any], kv_groups: int, group: Group
) -> tuple[nn.Module, dict[str, Any]]:
    """
    An attention module and its arguments, for the local heads.

    Attention functions read the sinks and the size of a group of heads from the module: they must be the local ones.
    """
    local: dict[str, Any] = {"num_key_value_groups": kv_groups}
    if (sinks := kwargs.get("s_aux")) is not None:
        local["sinks"] = sinks.split(even_split(len(sinks), group.size))[group.rank]
        kwargs = kwargs | {"s_aux": local["sinks"]}
    overrides = {name: value for name, value in local.items() if hasattr(module, name)}
    # With the config of the module: by default a view gets one that names packed attention.
    return view_of(module, {"config": module.config, **overrides}), kwargs
