"""
Attention of which each process of a group computes a part; see [`ContextParallelLayout`].

Around it a process has its own tokens only, `(1, N, t, D)`. For attention it has either all tokens of some heads, and
nothing else changes, or all keys and values for its own queries, with a layout that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..model.views import view_of
from .collectives import even
from .layout import HEADS, ContextParallelLayout


__all__ = ["attend_context_parallel"]


def attend_context_parallel(
    attend: Callable[..., torch.Tensor],
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    cp_layout: ContextParallelLayout,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """
    What `attend(module, query, key, value, layout, kwargs)` says for own tokens: `(1, t, N, D)` of queries
    `(1, N, t, D)`, keys and values `(1, K, t, D)`.
    """
    if cp_layout.how != HEADS:
        key, value = (cp_layout.gathered(x[0].transpose(0, 1)).transpose(0, 1).unsqueeze(0) for x in (key, value))
        return attend(module, query, key, value, cp_layout.queries, kwargs)
    n, heads, groups = cp_layout.group.size, query.shape[1], key.shape[1]
    # Keys are repeated as little as lets every process have whole groups; else once for each of their queries.
    copies = next((c for c in range(1, heads // groups + 1) if heads % (groups * c) == groups * c % n == 0), 0)
    copies = copies or heads // groups
    of_queries, of_keys = even(heads, n), even(groups * copies, n)
    if copies > 1:
        key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    query, key, value = (
        cp_layout.to_heads(x[0].transpose(0, 1), dealt).transpose(0, 1).unsqueeze(0)
        for x, dealt in ((query, of_queries), (key, of_keys), (value, of_keys))
    )
    own: dict[str, Any] = {"num_key_value_groups": heads // (groups * copies)}
    if kwargs.get("s_aux") is not None:
        own["sinks"] = kwargs["s_aux"].split(of_queries)[cp_layout.group.rank]
        kwargs = kwargs | {"s_aux": own["sinks"]}
    # The attention function asks its module for its sinks, and how many heads share a key.
    held = {name: value for name, value in own.items() if hasattr(module, name)}
    output = attend(view_of(module, {"config": module.config, **held}), query, key, value, cp_layout.layout, kwargs)
    return cp_layout.to_tokens(output[0], of_queries).unsqueeze(0)
