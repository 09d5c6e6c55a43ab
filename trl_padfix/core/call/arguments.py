"""Pack the arguments of a decoder call, and unpack its output to the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.modeling_outputs import ModelOutput

from ..errors import PaddingRemovalError, UnpackableCallError
from ..layout.layout import Layout, pack, unpack
from ..model.positions import Numbering, packed_positions
from ..parallel.layout import ContextParallelLayout
from .calls import ModelCall
from .images import visual_mask
from .inputs import DecoderInputs


__all__ = ["local_arguments", "pack_arguments", "padded_output", "unpack_output"]


_FOR_EACH_TOKEN = {"inputs_embeds", "per_layer_inputs"}
"""Floating-point arguments with one value per token, `(B, L, ...)`."""

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_LAYOUT = {"attention_mask", "position_ids", "cache_position", "seq_idx", *_BOUNDS}
"""Arguments that follow from the layout of a packed row."""


def local_arguments(packed: dict[str, Any], cp_layout: ContextParallelLayout) -> dict[str, Any]:
    """
    Select the local tokens in the packed arguments of a decoder.

    These are values `(1, T, ...)`, positions `(P, 1, T)` and the features of visual tokens.
    """
    T = cp_layout.layout.packed_tokens
    features = _feature_index(visual_mask(packed, (1, T)), partial(cp_layout.local, dim=1))

    def local(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            return x
        if tuple(x.shape[:2]) == (1, T):
            return cp_layout.local(x, dim=1)
        if tuple(x.shape[1:]) == (1, T):
            return cp_layout.local(x, dim=2)
        return x if features is None or len(x) != features[0] else x.index_select(0, features[1])

    return tree_map(local, packed)


def _feature_index(
    visual: torch.Tensor | None, select: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, torch.Tensor] | None:
    """The number of visual tokens, and the indices of the features of those visual tokens that `select` keeps."""
    if visual is None:
        return None
    # Features are in the order of the visual tokens: a feature has as index the number of visual tokens before it.
    index = (visual.flatten().cumsum(0) - 1).view(visual.shape)
    return int(visual.sum()), select(index)[select(visual)]


def pack_arguments(inputs: DecoderInputs, layout: Layout, numbering: Numbering) -> dict[str, Any]:
    """
    Pack the arguments of a decoder call.

    Args:
        inputs ([`DecoderInputs`]):
            Inputs of the decoder, `(B, L, ...)` if they have a value per token.
        layout ([`Layout`]):
            Layout of the call.
        numbering ([`Numbering`]):
            Numbers the tokens if the call has no `position_ids`.

    Returns:
        `dict`: the arguments for the packed row, without a mask.

    Raises:
        UnpackableCallError: If a tensor among the arguments is not one value per token.
    """
    features = _feature_index(visual_mask(inputs.arguments, layout.batch_shape), partial(pack, layout=layout))
    pack_value = partial(_pack_value, layout, features)
    packed = {k: tree_map(partial(pack_value, k), v) for k, v in inputs.arguments.items() if k not in _OF_LAYOUT}
    if (positions := inputs.positions) is None:
        new_positions = packed_positions(numbering, inputs.ids, inputs.mask, layout).unsqueeze(0)
    else:
        # `(B, L)`, `(1, L)` for all rows, or `(P, B, L)`, whose axes are packed one by one.
        axes = positions.expand(*positions.shape[:-2], *layout.batch_shape).reshape(-1, *layout.batch_shape)
        new_positions = torch.cat([pack(axis, layout) for axis in axes])
        new_positions = new_positions if positions.dim() == 2 else new_positions.unsqueeze(1)
    return packed | {"attention_mask": None, "position_ids": new_positions}


def _pack_value(layout: Layout, features: tuple[int, torch.Tensor] | None, name: str, value: Any) -> Any:
    """
    One value of the argument `name`, for the packed tokens.

    `features` are the number of visual tokens in the padded batch, and the index of each packed one among them.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    # Ids and masks have one integer per token. Other tensors may have the shape `(B, L, ...)` by chance, so that their
    # name decides.
    is_plain = value.dim() == 2 and not value.is_floating_point()
    if tuple(value.shape[:2]) == layout.batch_shape and (is_plain or name in _FOR_EACH_TOKEN):
        return pack(value, layout)
    if features is not None and value.shape[0] == features[0]:
        return value.index_select(0, features[1])
    raise UnpackableCallError(
        name,
        f"The decoder was called with `{name}` of shape {tuple(value.shape)}, which is not a value for each token of "
        f"the batch {layout.batch_shape}, and a packed batch has no rows to which it could belong. Padding cannot be "
        "removed from this call: use `padding_free=False`, or run it inside `with handle.disabled():`.",
    )


def unpack_output(output: Any, layout: Layout, call: ModelCall, cp_layout: ContextParallelLayout | None = None) -> Any:
    """
    Unpack the output of a decoder to the padded batch.

    Args:
        output (`ModelOutput` or `tuple`):
            The output for the packed row; with `cp_layout` for the local tokens.
        layout ([`Layout`]):
            Layout of the call.
        call ([`ModelCall`]):
            The call of the model, which may need only the states that its head scores.
        cp_layout ([`ContextParallelLayout`], *optional*):
            If given, values are all-gathered, except for states that the head scores: these stay local.

    Returns:
        The output, with values of shape `(B, L, ...)`.
    """
    if not isinstance(output, ModelOutput | tuple):
        raise PaddingRemovalError(
            f"The decoder returned a `{type(output).__name__}`, which is not a transformers output."
        )
    (hidden, *others), spec = tree_flatten(output)  # the last hidden states are the first output of any decoder
    states = _states(hidden, layout, call, cp_layout)
    return tree_unflatten([states, *(_unpack_value(value, layout, cp_layout) for value in others)], spec)


def padded_output(output: Any, call: ModelCall, mask: Any = None) -> Any:
    """
    The output of a decoder that ran on padded rows, with the states that the model around it needs.

    Args:
        output (`ModelOutput` or `tuple`):
            The output, `(B, L, ...)`.
        call ([`ModelCall`]):
            The call of the model, which may need only the states that its head scores.
        mask (*optional*):
            The attention mask; `None` if all tokens are real. Only one of shape `(B, L)` tells which token is the last
            one of a row.
    """
    hidden = output[0]  # the last hidden states are the first output of any decoder
    if call.scored_index is not None:
        states = hidden.flatten(0, 1).index_select(0, call.scored_index).unsqueeze(0)
        # If no state is scored, any one state: every process joins the collectives of backward.
        states = states if len(call.scored_index) else hidden[:1, :1]
    elif call.pools_last and mask is None:
        states = hidden[:, -1:].expand_as(hidden)
    elif call.pools_last and isinstance(mask, torch.Tensor) and mask.shape == hidden.shape[:2]:
        last = ((mask != 0) * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        row = torch.arange(len(mask), device=mask.device)
        states = hidden[row, last].unsqueeze(1).expand_as(hidden)
    else:
        return output
    if isinstance(output, tuple):
        return (states, *output[1:])
    output[next(iter(output))] = states
    return output


def _states(
    hidden: torch.Tensor, layout: Layout, call: ModelCall, cp_layout: ContextParallelLayout | None
) -> torch.Tensor:
    """
    The last hidden states, `(B, L, H)`.

    If the model pools the last token, its state stands in all columns of a row. If a head scores `n` states, only
    these are returned, `(1, n, H)`.
    """
    if not call.pools_last and call.scored_index is None:
        return _unpack_value(hidden, layout, cp_layout)
    index = layout.packed_index_of(layout.last_index if call.scored_index is None else call.scored_index)
    if cp_layout is None:
        states = hidden[0].index_select(0, index)
    elif call.pools_last:
        states = cp_layout.all_gather_at(hidden[0], index)
    elif not len(index):
        states = hidden[0, :1]  # any state, as in `padded_output`; perhaps filler, which has no index in the batch
    else:
        states = hidden[0].index_select(0, cp_layout.local_index(index))
    states = states.unsqueeze(0)
    return states.transpose(0, 1).expand(-1, layout.batch_shape[1], -1) if call.pools_last else states


def _unpack_value(value: Any, layout: Layout, cp_layout: ContextParallelLayout | None) -> Any:
    """One output for the padded batch; unchanged if it is not one value per token."""
    if not isinstance(value, torch.Tensor):
        return value
    # Hidden states are `(1, T, H)`. Router logits are `(T, experts)`; losses expect `(B * L, experts)`.
    tokens = layout.packed_tokens if cp_layout is None else cp_layout.local_tokens
    is_row = tuple(value.shape[:2]) == (1, tokens)
    if not is_row and (value.dim() != 2 or value.shape[0] != tokens):
        return value
    row = value[0] if is_row else value
    padded = unpack((row if cp_layout is None else cp_layout.all_gather_for_loss(row)).unsqueeze(0), layout)
    return padded if is_row else padded.flatten(0, 1)
