"""Read the arguments of a decoder call, pack them, and unpack its output to the padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from ..errors import PaddingRemovalError, UnpackableCallError
from ..layout.build import tree_arguments_in
from ..layout.layout import Layout, pack, unpack
from ..model.inspection import takes
from ..model.older import CACHES
from ..model.positions import Numbering, packed_positions
from .calls import CALL, LocalTokens, ModelCall
from .prepared_masks import PreparedMasks, plain_mask


__all__ = [
    "DecoderInputs", "draws_noise", "feature_index", "pack_arguments", "padded_output", "unpack_output", "visual_mask",
]  # fmt: skip

_ROW_ARGUMENTS = ("attention_mask", "position_ids", *CACHES)
"""Arguments of a decoder that describe its rows, or continue rows of an earlier call."""

_COVERED_BY_IDS = {"input_ids", "attention_mask", "position_ids", "labels", "seq_idx", "completion_mask"}
"""Per-token arguments that are equal, or do not matter to the decoder, wherever ids and positions are equal."""


@dataclass(frozen=True, eq=False)
class DecoderInputs:
    """
    The inputs of one decoder call.

    Attributes:
        arguments (`dict`):
            The arguments of the decoder by name, with those that the modules around it have dropped, and without
            `tree_*`.
        ids (`torch.Tensor` of shape `(B, L)`, *optional*):
            Ids that the decoder looks up.
        embeds (`torch.Tensor` of shape `(B, L, H)`, *optional*):
            Embeddings, if it gets no ids.
        mask (`torch.Tensor` of shape `(B, L)`, *optional*):
            1 for real tokens; `None` if all tokens are real.
        positions (`torch.Tensor` of shape `(B, L)`, `(1, L)` or `(P, B, L)`, *optional*):
            Positions.
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`, *optional*):
            Where the sequences of a pre-packed batch begin and end.
        is_packed (`bool`):
            Whether the batch arrives packed, with several sequences per row.
        compared_ids (`torch.Tensor` of shape `(B, L)`, *optional*):
            Ids that prefix sharing compares in addition to the embeddings: the module around made these from the ids.
        images (`tuple[str, ...]`):
            Names of the features that the module around turned into embeddings.
        given_mask (*optional*):
            The mask that the outermost of these modules was called with.
        prepared ([`PreparedMasks`], *optional*):
            Masks that the decoder got, if tokens see more in them than in the decoder's own masks.
        tree (`dict`):
            The `tree_*` arguments; empty if the batch is not a tree row.
    """

    arguments: dict[str, Any]
    ids: torch.Tensor | None
    embeds: torch.Tensor | None
    mask: torch.Tensor | None
    positions: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    is_packed: bool
    compared_ids: torch.Tensor | None = None
    images: tuple[str, ...] = ()
    given_mask: Any = None
    prepared: PreparedMasks | None = None
    tree: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls, call: dict[str, Any], handle: Any, outer: ModelCall | None = None, is_causal: bool = True
    ) -> DecoderInputs:
        """
        Read a decoder call.

        Args:
            call (`dict`):
                Arguments of the decoder by name.
            handle ([`PaddingRemoval`]):
                Handle of the decoder.
            outer ([`ModelCall`], *optional*):
                Call of the model around the decoder.
            is_causal (`bool`, *optional*, defaults to `True`):
                Whether the decoder's attention is causal without a mask.

        Raises:
            PaddingRemovalError: If `tree_*` arguments are unknown or incomplete.
        """
        outer = ModelCall(handle.decoder) if outer is None else outer
        around, dropped = outer.outer_arguments, outer.model_arguments | outer.outer_arguments
        tree = {} if CALL in call else tree_arguments_in(dropped | call)
        prepared = None
        if tree:
            if call.get("position_ids") is None and dropped.get("position_ids") is not None:
                call = call | {"position_ids": dropped["position_ids"]}  # Mamba's model passes only ids
            # The module around makes masks of a tree row, which it treats as a packed batch.
            call = call | {"attention_mask": None} if around else call
        elif around:
            call, prepared = plain_mask(call, around, handle.decoder, is_causal)
        elif all(call.get(k) is None for k in _ROW_ARGUMENTS):
            # Mamba's model passes no positions to its decoder, RWKV's not even the mask.
            call = call | {k: v for k, v in outer.model_arguments.items() if call.get(k) is None}
        if outer.model_arguments and outer.model_arguments.get("use_cache") is None:
            # GIT fills it in from its config, although the caller left it open.
            call = {k: v for k, v in call.items() if k != "use_cache"}
        mask, positions, cu_seqlens = (call.get(k) for k in ("attention_mask", "position_ids", "cu_seq_lens_q"))
        # Positions of several axes (M-RoPE) repeat and skip numbers inside of images: they show no beginning.
        shows_sequences = cu_seqlens is not None if positions is None else positions.dim() == 2
        pixels = (k for k, v in around.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
        return cls(
            arguments={k: v for k, v in call.items() if k not in tree},
            ids=call.get("input_ids"),
            embeds=call.get("inputs_embeds"),
            mask=mask,
            positions=positions,
            cu_seqlens=cu_seqlens,
            is_packed=mask is None and handle.takes_positions and shows_sequences,
            compared_ids=_compared_ids(call, around, is_tuned=handle.anatomy.has_virtual_tokens and not tree),
            images=tuple(k for k in pixels if k != "inputs_embeds"),
            given_mask=(around or call).get("attention_mask"),
            prepared=prepared,
            tree=tree,
        )

    @property
    def batch(self) -> torch.Tensor | None:
        """Ids, or embeddings where the decoder gets no ids."""
        return self.embeds if self.ids is None else self.ids

    @property
    def any_ids(self) -> torch.Tensor | None:
        """The ids of the batch, of the decoder's own call or of the module around it."""
        return self.compared_ids if self.ids is None else self.ids

    @cached_property
    def others(self) -> dict[str, torch.Tensor]:
        """Tensors other than ids, mask and positions, by name."""
        tensors = ((k, v) for k, v in self.arguments.items() if isinstance(v, torch.Tensor))
        return {k: v for k, v in tensors if k not in _COVERED_BY_IDS}


def _compared_ids(call: dict[str, Any], around: dict[str, Any], is_tuned: bool) -> torch.Tensor | None:
    """Ids of tokens that the decoder gets as embeddings; `is_tuned`: PEFT may have put virtual tokens before them."""
    ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
    compared = (around.get("input_ids") if ids is None else ids) if around else None
    if ids is compared is None and embeds is not None and is_tuned:
        # The embeddings identify tokens then, and ids do not.
        return torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    return compared


_FOR_EACH_TOKEN = {"inputs_embeds", "per_layer_inputs"}
"""Floating-point arguments with one value per token, `(B, L, ...)`."""

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_OF_LAYOUT = {"attention_mask", "position_ids", "cache_position", "seq_idx", *_BOUNDS}
"""Arguments that follow from the layout of a packed row."""


def pack_arguments(
    inputs: DecoderInputs, layout: Layout, decoder: PreTrainedModel, numbering: Numbering
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

    Returns:
        `dict`: the arguments for the packed row. Prepared masks are described by their kinds; it has no other masks.

    Raises:
        UnpackableCallError: If a tensor among the arguments is not one value per token.
    """
    features = feature_index(visual_mask(inputs.arguments, layout.batch_shape), partial(pack, layout=layout))
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
    return packed | _neftune_embeddings(decoder, inputs.ids, layout)


def visual_mask(call: dict[str, Any], batch_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Mask of the visual tokens, `(B, L)`, if the call has one; features are then in the order of these tokens."""
    tensors = [v for k, v in call.items() if isinstance(v, torch.Tensor) and k != "attention_mask"]
    return next((x for x in tensors if x.dtype == torch.bool and tuple(x.shape) == tuple(batch_shape)), None)


def feature_index(
    visual: torch.Tensor | None, select: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[int, torch.Tensor] | None:
    """The number of visual tokens, and the indices of the features of those visual tokens that `select` keeps."""
    if visual is None:
        return None
    # Features are in the order of the visual tokens: a feature has as index the number of visual tokens before it.
    index = (visual.flatten().cumsum(0) - 1).view(visual.shape)
    return int(visual.sum()), select(index)[select(visual)]


def draws_noise(decoder: PreTrainedModel) -> bool:
    """Whether a hook of NEFTune adds noise to the embeddings of a decoder."""
    embedding = decoder.get_input_embeddings()
    return embedding.training and hasattr(embedding, "neftune_noise_alpha")


def _neftune_embeddings(decoder: PreTrainedModel, ids: torch.Tensor | None, layout: Layout) -> dict[str, Any]:
    """
    The embeddings of a batch with the noise of NEFTune, packed; empty if NEFTune is off.

    Its hook on the embedding scales the noise by the length of the rows. The hook runs on the padded batch here, so
    that it draws the same noise as in the padded forward.
    """
    if ids is None or not draws_noise(decoder):
        return {}
    if takes(decoder, "per_layer_inputs"):
        raise PaddingRemovalError(
            f"{type(decoder).__name__} looks its token ids up in every layer, and NEFTune's noise can be packed with "
            "the embeddings only. Set one of `padding_free` and `neftune_noise_alpha`."
        )
    return {"input_ids": None, "inputs_embeds": pack(decoder.get_input_embeddings()(ids), layout)}


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


def unpack_output(output: Any, tokens: LocalTokens, call: ModelCall) -> Any:
    """
    Unpack the output of a decoder to the padded batch.

    Args:
        output (`ModelOutput` or `tuple`):
            The output for the local tokens.
        tokens ([`LocalTokens`]):
            These tokens, with the layout of the packed row.
        call ([`ModelCall`]):
            The call of the model, which may need only the states that its head scores.

    Returns:
        The output, with values of shape `(B, L, ...)`; only states that the head scores stay local.
    """
    if not isinstance(output, ModelOutput | tuple):
        raise PaddingRemovalError(
            f"The decoder returned a `{type(output).__name__}`, which is not a transformers output."
        )
    (hidden, *others), spec = tree_flatten(output)  # the last hidden states are the first output of any decoder
    if tuple(hidden.shape[:2]) != (1, tokens.count):  # BigBird drops what it has added to fill a block
        raise UnpackableCallError(
            "dropped tokens",
            f"The decoder returned states of shape {tuple(hidden.shape)} for {tokens.count} packed tokens.",
        )
    scores = call.pools_last or call.scored_index is not None
    values = [_unpack_value(x, tokens) for x in (others if scores else [hidden, *others])]
    if scores:
        # If the model pools the last token, its state stands in all columns of a row. If a head scores `n` states,
        # only these are returned, `(1, n, H)`.
        layout, pools = tokens.layout, call.pools_last
        index = layout.packed_index_of(layout.last_index if call.scored_index is None else call.scored_index)
        states = tokens.states_at(hidden[0], index, of_all=pools).unsqueeze(0)
        values.insert(0, states.transpose(0, 1).expand(-1, layout.batch_shape[1], -1) if pools else states)
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
            The attention mask; `None` if all tokens are real. Only a mask of shape `(B, L)` shows which token is the
            last one of a row.
    """
    hidden = output[0]  # the last hidden states are the first output of any decoder
    if call.scored_index is not None:
        states = hidden.flatten(0, 1).index_select(0, call.scored_index).unsqueeze(0)
        # If no state is scored, keep any one state: every process joins the collectives of backward.
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


def _unpack_value(value: Any, tokens: LocalTokens) -> Any:
    """One output for the padded batch; unchanged if it is not one value per token."""
    if not isinstance(value, torch.Tensor):
        return value
    # Hidden states are `(1, T, H)`. Router logits are `(T, experts)`; losses expect `(B * L, experts)`.
    is_row = tuple(value.shape[:2]) == (1, tokens.count)
    if not is_row and (value.dim() != 2 or value.shape[0] != tokens.count):
        return value
    padded = unpack(tokens.gather(value[0] if is_row else value).unsqueeze(0), tokens.layout)
    return padded if is_row else padded.flatten(0, 1)
