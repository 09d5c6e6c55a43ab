"""
Context-parallel attention; see [`ContextParallelLayout`].

Around attention a process has its local tokens, `(1, N, t, D)`. With `"heads"` it attends with some heads for all
tokens, and the layout stays the same. With `"keys"` it attends with all heads for its local queries to the keys and
values of all tokens, with a layout of its own. With `"rows"` all that its queries see is local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..model.views import view_of
from .collectives import even_split
from .layout import HEADS, ROWS, ContextParallelLayout


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
    if cp_layout.comm == ROWS:
        return attend(module, query, key, value, cp_layout.local_layout, kwargs)
    if cp_layout.comm != HEADS:
        key, value = (cp_layout.all_gather(x[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0) for x in (key, value))
        return attend(module, query, key, value, cp_layout.local_layout, kwargs)
    heads, kv_heads, size = query.shape[1], key.shape[1], cp_layout.group.size
    copies = _copies_of_kv_heads(heads, kv_heads, size)
    heads_per_rank, kv_heads_per_rank = even_split(heads, size), even_split(kv_heads * copies, size)
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    # The all-to-all has tokens in front, `(t, N, D)`; attention has heads in front.
    query, key, value = (
        cp_layout.tokens_to_heads(x[0].transpose(0, 1), per_rank).transpose(0, 1).unsqueeze(0)
        for x, per_rank in ((query, heads_per_rank), (key, kv_heads_per_rank), (value, kv_heads_per_rank))
    )
    local: dict[str, Any] = {"num_key_value_groups": heads // (kv_heads * copies)}
    if kwargs.get("s_aux") is not None:
        local["sinks"] = kwargs["s_aux"].split(heads_per_rank)[cp_layout.group.rank]
        kwargs = kwargs | {"s_aux": local["sinks"]}
    # Attention functions read the sinks and the size of a group of heads from the module: they must be the local ones.
    overrides = {name: value for name, value in local.items() if hasattr(module, name)}
    # With its own config: by default a view gets one for packed attention.
    view = view_of(module, {"config": module.config, **overrides})
    output = attend(view, query, key, value, cp_layout.layout, kwargs)
    return cp_layout.heads_to_tokens(output[0], heads_per_rank).unsqueeze(0)


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
