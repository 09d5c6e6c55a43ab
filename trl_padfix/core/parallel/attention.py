"""
Context-parallel attention; see [`ContextParallelLayout`].

Around attention a process has its local tokens, `(1, N, t, D)`. It attends with some heads for all tokens
(Ulysses), and the layout stays the same. Where each process has whole rows, all keys of its queries are local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..model.views import view_of
from .collectives import Exchange, Group, even_split
from .layout import ContextParallelLayout


__all__ = ["attend_context_parallel", "exchange_around"]


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
    if cp_layout.whole_rows:
        return attend(module, query, key, value, cp_layout.local_layout, kwargs)

    def attend_received(*received: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in received)
        kv_groups = query.shape[1] // key.shape[1]
        local_module, local_kwargs = _with_local_heads(module, kwargs, kv_groups, cp_layout.group)
        return attend(local_module, query, key, value, cp_layout.layout, local_kwargs)[0]

    # Exchanged tensors have tokens in front, attention has heads in front.
    states = [x[0].transpose(0, 1) for x in (query, key, value)]
    return exchange_around(attend_received, states, cp_layout).unsqueeze(0)


def exchange_around(
    attend: Callable[..., torch.Tensor], states: list[torch.Tensor], exchange: Exchange | ContextParallelLayout
) -> torch.Tensor:
    """
    Attention `attend(query, key, value)` for the `states` of the local tokens, with the communication around it.

    Queries, keys and values are `(t, N, D)`; `attend` gets those of all tokens with the local heads.
    """
    query, *kv = states
    processes = len(exchange.tokens_per_rank)
    copies = _copies_of_kv_heads(query.shape[1], kv[0].shape[1], processes)
    if copies > 1:
        kv = [x.repeat_interleave(copies, dim=1) for x in kv]
    states = [query, *kv]
    heads = [even_split(x.shape[1], processes) for x in states]
    return exchange.heads_to_tokens(attend(*exchange.tokens_to_heads(states, heads)), heads[0])


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
