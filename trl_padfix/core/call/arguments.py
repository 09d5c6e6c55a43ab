"""Pack the arguments of a decoder call, and unpack its output to the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers.modeling_outputs import ModelOutput

from ..errors import PaddingRemovalError, UnpackableCallError
from ..layout.layout import Layout, pack, unpack
from ..layout.shared_prefixes import PrefixedLayout
from ..model.inspection import takes
from ..model.positions import Numbering, packed_positions
from ..parallel.layout import ContextParallelLayout
from .calls import ModelCall
from .inputs import DecoderInputs


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["pack_arguments", "padded_output", "unpack_output", "visual_mask"]


_FOR_EACH_TOKEN = {"inputs_embeds", "per_layer_inputs"}
"""Floating-point arguments with one value per token, `(B, L, ...)`."""

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_LAYOUT = {"attention_mask", "position_ids", "cache_position", "seq_idx", *_BOUNDS}
"""Arguments that follow from the layout of a packed row."""


def pack_arguments(
    inputs: DecoderInputs,
    layout: Layout,
    decoder: PreTrainedModel,
    numbering: Numbering,
    cp_layout: ContextParallelLayout | None = None,
) -> dict[str, Any]:
    """
    Pack the arguments of a decoder call: all that the decoder gets, for the packed tokens.

    Args:
        inputs ([`DecoderInputs`]):
            Inputs of the decoder, `(B, L, ...)` if they have a value per token.
        layout ([`Layout`]):
            Layout of the call.
        decoder (`PreTrainedModel`):
            The decoder, whose embedding adds the noise of NEFTune.
        numbering ([`Numbering`]):
            Numbers the tokens if the call has no `position_ids`.
        cp_layout ([`ContextParallelLayout`], *optional*):
            If given, the arguments are those for the local tokens.

    Returns:
        `dict`: the arguments for the packed row. Prepared masks are described by their kinds; there are no others.

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
    mask = None if inputs.prepared is None else inputs.prepared.for_decoder()
    # Decoders cache by default, and a packed row has no rows that a later call could continue.
    packed |= {"attention_mask": mask, "position_ids": new_positions, "use_cache": False}
    packed |= _neftune_embeddings(decoder, inputs.ids, layout)
    return packed if cp_layout is None else _local_arguments(packed, cp_layout)


def visual_mask(call: dict[str, Any], batch_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Mask of the visual tokens, `(B, L)`, if the call has one; features are then in the order of these tokens."""
    tensors = [v for k, v in call.items() if isinstance(v, torch.Tensor) and k != "attention_mask"]
    return next((x for x in tensors if x.dtype == torch.bool and tuple(x.shape) == tuple(batch_shape)), None)


def _feature_index(
    visual: torch.Tensor | None, select: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, torch.Tensor] | None:
    """The number of visual tokens, and the indices of the features of those visual tokens that `select` keeps."""
    if visual is None:
        return None
    # Features are in the order of the visual tokens: a feature has as index the number of visual tokens before it.
    index = (visual.flatten().cumsum(0) - 1).view(visual.shape)
    return int(visual.sum()), select(index)[select(visual)]


def _local_arguments(packed: dict[str, Any], cp_layout: ContextParallelLayout) -> dict[str, Any]:
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


def _neftune_embeddings(decoder: PreTrainedModel, ids: torch.Tensor | None, layout: Layout) -> dict[str, Any]:
    """
    The embeddings of a batch with the noise of NEFTune, packed; empty if NEFTune is off.

    Its hook on the embedding scales the noise by the length of the rows. The hook runs on the padded batch here, so
    that it draws the same noise as in the padded forward.
    """
    embedding = decoder.get_input_embeddings()
    if ids is None or not (embedding.training and hasattr(embedding, "neftune_noise_alpha")):
        return {}
    if layout.computed_tokens < layout.real_tokens:
        raise PaddingRemovalError(
            "NEFTune draws noise for every token of every row, so no two rows have a prefix in common. Attach with "
            "`prefix_sharing=False`, or leave `neftune_noise_alpha` out."
        )
    if takes(decoder, "per_layer_inputs"):
        raise PaddingRemovalError(
            f"{type(decoder).__name__} looks its token ids up in every layer, and NEFTune's noise can be packed with "
            "the embeddings only. Set one of `padding_free` and `neftune_noise_alpha`."
        )
    return {"input_ids": None, "inputs_embeds": pack(embedding(ids), layout)}


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
        f"The decoder was called with `{name}` of shape {tuple(value.shape)}. It is not known to hold a value for "
        f"each token of the batch {layout.batch_shape}, and a packed batch has no rows to which it could belong. "
        "Padding cannot be removed from this call: use `padding_free=False`, or run it inside "
        "`with handle.disabled():`.",
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
        The output, with values of shape `(B, L, ...)`; that of a shared prefix stays packed.
    """
    if isinstance(layout, PrefixedLayout) and layout.is_prefix:
        # The states are recorded, and nothing reads this output. Under FSDP2 the model runs around its decoder. It
        # would compute a load-balancing loss from the router logits of the prefix and the mask of the batch.
        if isinstance(output, ModelOutput) and output.get("router_logits") is not None:
            output["router_logits"] = None
        return output
    if not isinstance(output, ModelOutput | tuple):
        raise PaddingRemovalError(
            f"The decoder returned a `{type(output).__name__}`, which is not a transformers output."
        )
    (hidden, *others), spec = tree_flatten(output)  # the last hidden states are the first output of any decoder
    scores = call.pools_last or call.scored_index is not None
    values = [_unpack_value(x, layout, cp_layout) for x in (others if scores else [hidden, *others])]
    if scores:
        # If the model pools the last token, its state stands in all columns of a row. If a head scores `n` states,
        # only these are returned, `(1, n, H)`.
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
        states = states.transpose(0, 1).expand(-1, layout.batch_shape[1], -1) if call.pools_last else states
        values.insert(0, states)
    return tree_unflatten(values, spec)


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
