"""The arguments of a decoder call, packed, and its output, laid out over the batch again."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.modeling_outputs import ModelOutput

from ..errors import PaddingRemovalError
from ..layout.layout import Layout, pack, unpack
from ..model.positions import Numbering, packed_positions
from ..parallel.layout import ContextParallelLayout
from .calls import ModelCall
from .images import visual_mask


__all__ = ["bind", "local_arguments", "pack_arguments", "unpack_output"]


_FOR_EACH_TOKEN = {"inputs_embeds", "per_layer_inputs"}

_SAID_BY_LAYOUT = ("cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say of a packed row what its layout says."""


def bind(forward: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those of `**kwargs` included."""
    bound = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)


def local_arguments(packed: dict[str, Any], cp_layout: ContextParallelLayout) -> dict[str, Any]:
    """The packed arguments of a decoder, `(1, T, ...)` or positions `(P, 1, T)`, for the tokens of this process."""
    T = cp_layout.layout.packed_tokens

    def own(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return x
        along = 1 if tuple(x.shape[:2]) == (1, T) else 2 if tuple(x.shape[1:]) == (1, T) else None
        return x if along is None else cp_layout.cut(x, along)

    return {name: own(value) for name, value in packed.items()}


def pack_arguments(call: dict[str, Any], layout: Layout, numbering: Numbering) -> dict[str, Any]:
    """
    The arguments of a decoder for the packed tokens; `numbering` gives them positions where the `call` has none.

    Raises:
        PaddingRemovalError: If a tensor among them is not a value for each token.
    """
    visual = visual_mask(call, layout.batch_shape)
    if visual is not None:
        # Features of visual tokens come in the order of the padded batch: where each packed one is among them.
        order = pack((visual.flatten().cumsum(0) - 1).view(visual.shape), layout)[pack(visual, layout)]
        visual = (int(visual.sum()), order)
    apart = {"attention_mask", "position_ids", *_SAID_BY_LAYOUT}
    packed = {k: tree_map(partial(_pack_value, k, layout, visual), v) for k, v in call.items() if k not in apart}
    if (positions := call.get("position_ids")) is None:
        rows = packed_positions(numbering, call, layout).unsqueeze(0)
    else:
        rows = positions.expand(*positions.shape[:-2], *layout.batch_shape).reshape(-1, *layout.batch_shape)
        rows = torch.cat([pack(row, layout) for row in rows])
        rows = rows if positions.dim() == 2 else rows.unsqueeze(1)
    return packed | {"attention_mask": None, "position_ids": rows}


def _pack_value(name: str, layout: Layout, visual: tuple[int, torch.Tensor] | None, value: Any) -> Any:
    """An argument of the decoder, or what is within it, for the packed tokens."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    # Numbers for each token, ids or masks; of what could have another shape by chance, what is known to be one.
    is_plain = value.dim() == 2 and not value.is_floating_point()
    if tuple(value.shape[:2]) == layout.batch_shape and (is_plain or name in _FOR_EACH_TOKEN):
        return pack(value, layout)
    if visual is not None and value.shape[0] == visual[0]:
        return value.index_select(0, visual[1])
    raise PaddingRemovalError(
        f"The decoder was called with `{name}` of shape {tuple(value.shape)}, which is not a value for each token of "
        f"the batch {layout.batch_shape}, and a packed batch has no rows to which it could belong. Padding cannot be "
        "removed from this call: use `padding_free=False`, or run it inside `with handle.disabled():`."
    )


def unpack_output(
    output: Any, layout: Layout, call: ModelCall | None = None, cp_layout: ContextParallelLayout | None = None
) -> Any:
    """
    Lay the output of a decoder out over the batch; the `call` of its model may ask for other states.

    With `cp_layout` it is the output for the tokens of this process, and what the others have computed is told; but the
    states that a head scores, which are this process's own.
    """
    if not isinstance(output, ModelOutput | tuple):
        raise PaddingRemovalError(
            f"The decoder returned a `{type(output).__name__}`, which is not a transformers output."
        )
    (hidden, *others), spec = tree_flatten(output)
    states = _states(hidden, layout, call, cp_layout)
    return tree_unflatten([states, *(_unpack_value(value, layout, cp_layout) for value in others)], spec)


def _states(
    hidden: torch.Tensor, layout: Layout, call: ModelCall | None, cp_layout: ContextParallelLayout | None
) -> torch.Tensor:
    """`(B, L, H)`; the last real token of a row in all its columns, or `(1, n, H)`, if the call asks for that."""
    if call is not None and call.pools_last:
        index = layout.last_index
    elif call is not None and call.scored is not None:
        index = call.scored
    else:
        return _unpack_value(hidden, layout, cp_layout)
    # A batch without padding runs as it is, unless it is cut: a layout that looks for prefixes has its rows sorted.
    index = index if layout.is_trivial and cp_layout is None else layout.packed_positions_of(index)
    if cp_layout is None:
        chosen = hidden.flatten(0, 1).index_select(0, index)
    elif call.pools_last:
        chosen = cp_layout.told_of(hidden[0], index)
    else:
        chosen = hidden[0].index_select(0, cp_layout.among_own(index))
    chosen = chosen.unsqueeze(0)
    return chosen.transpose(0, 1).expand(-1, layout.batch_shape[1], -1) if call.pools_last else chosen


def _unpack_value(value: Any, layout: Layout, cp_layout: ContextParallelLayout | None = None) -> Any:
    if not isinstance(value, torch.Tensor) or (layout.is_trivial and cp_layout is None):
        return value
    # Hidden states `(1, T, H)`. Router logits: one row per token, `(T, experts)`; losses expect `(B * L, experts)`.
    tokens = layout.packed_tokens if cp_layout is None else cp_layout.tokens[cp_layout.group.rank]
    is_row = tuple(value.shape[:2]) == (1, tokens)
    if not is_row and (value.dim() != 2 or value.shape[0] != tokens):
        return value
    row = value[0] if is_row else value
    padded = unpack((row if cp_layout is None else cp_layout.told(row)).unsqueeze(0), layout)
    return padded if is_row else padded.flatten(0, 1)
