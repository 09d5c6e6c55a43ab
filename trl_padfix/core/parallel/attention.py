"""
Context-parallel attention; see [`ContextParallelLayout`].

Around attention a process has its local tokens, `(1, N, t, D)`. With `"heads"` it attends with some heads for all
tokens, and the layout stays the same. With `"keys"` it attends with all heads for its local queries to the keys and
values of all tokens, with a layout of its own. With `"rows"` all that its queries see is local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..model.views import view_of
from .collectives import even_split
from .layout import HEADS, ROWS, ContextParallelLayout


__all__ = ["attend_context_parallel", "heads_of_ranks", "with_copies"]


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
    if cp_layout.comm == ROWS:
        return attend(module, query, key, value, cp_layout.local_layout, kwargs)
    group = cp_layout.group
    # Exchanged tensors have tokens in front, `(t, N, D)`; attention has heads in front.
    states = [x[0].transpose(0, 1) for x in (query, key, value)]
    if cp_layout.comm != HEADS:
        states[1:] = cp_layout.all_gather(states[1:])
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in states)
        return attend(module, query, key, value, cp_layout.local_layout, kwargs)
    copies, heads = heads_of_ranks(query.shape[1], key.shape[1], group.size)
    local: dict[str, Any] = {"num_key_value_groups": query.shape[1] // (key.shape[1] * copies)}
    states = cp_layout.tokens_to_heads(with_copies(states, copies), heads)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in states)
    if kwargs.get("s_aux") is not None:
        local["sinks"] = kwargs["s_aux"].split(heads[0])[group.rank]
        kwargs = kwargs | {"s_aux": local["sinks"]}
    # Attention functions read the sinks and the size of a group of heads from the module: they must be the local ones.
    overrides = {name: value for name, value in local.items() if hasattr(module, name)}
    # With its own config: by default a view gets one for packed attention.
    view = view_of(module, {"config": module.config, **overrides})
    output = attend(view, query, key, value, cp_layout.layout, kwargs)
    return cp_layout.heads_to_tokens(output[0], heads[0]).unsqueeze(0)


def heads_of_ranks(heads: int, kv_heads: int, size: int) -> tuple[int, list[list[int]]]:
    """Copies of each KV head, and the heads of each process: of queries, keys and values."""
    copies = _copies_of_kv_heads(heads, kv_heads, size)
    kv_heads_per_rank = even_split(kv_heads * copies, size)
    return copies, [even_split(heads, size), kv_heads_per_rank, kv_heads_per_rank]


def with_copies(states: Sequence[torch.Tensor], copies: int) -> Sequence[torch.Tensor]:
    """Queries, and keys and values with their heads repeated, each `(t, N, D)`."""
    query, *keys = states
    return states if copies == 1 else [query, *(x.repeat_interleave(copies, dim=1) for x in keys)]


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
