"""The inputs of a decoder call, read once from its arguments and from those of the modules around the decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from ..layout.tree_arguments import tree_arguments_in
from ..model.older import CACHES
from .calls import LAYOUT, ModelCall
from .prepared_masks import PreparedMasks, plain_mask


__all__ = ["DecoderInputs", "DecoderTraits"]

_ROW_ARGUMENTS = ("attention_mask", "position_ids", *CACHES)
"""Arguments of a decoder that describe its rows, or continue rows of an earlier call."""

_COVERED_BY_IDS = {"input_ids", "attention_mask", "position_ids", "labels", "seq_idx", "completion_mask"}
"""Per-token arguments that are equal, or do not matter to the decoder, wherever ids and positions are equal."""


class DecoderTraits(Protocol):
    """Members of a [`PaddingRemoval`] that are needed to read a call."""

    decoder: Any
    anatomy: Any
    takes_positions: bool


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
            Where the sequences of a packed batch begin and end.
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
        cls, call: dict[str, Any], handle: DecoderTraits, outer: ModelCall | None = None, is_causal: bool = True
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
        tree = {} if LAYOUT in call else tree_arguments_in(dropped | call)
        prepared = None
        if tree:
            call = _of_tree(call, around, dropped)
        elif around:
            call, prepared = plain_mask(call, around, handle.decoder, is_causal)
        else:
            call = _of_model(call, outer.model_arguments)
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


def _of_tree(call: dict[str, Any], around: dict[str, Any], dropped: dict[str, Any]) -> dict[str, Any]:
    """A decoder call with a tree row, with the arguments that the modules around the decoder have `dropped`."""
    if call.get("position_ids") is None and dropped.get("position_ids") is not None:
        call = call | {"position_ids": dropped["position_ids"]}  # Mamba's model passes only ids
    # The module around makes masks of a tree row, which it treats as a packed batch.
    return call | {"attention_mask": None} if around else call


def _of_model(call: dict[str, Any], of_model: dict[str, Any]) -> dict[str, Any]:
    """A decoder call without arguments for its rows, with those of its model."""
    if any(call.get(k) is not None for k in _ROW_ARGUMENTS):
        return call
    # Mamba's model passes no positions to its decoder, RWKV's not even the mask.
    return call | {k: v for k, v in of_model.items() if call.get(k) is None}


def _compared_ids(call: dict[str, Any], around: dict[str, Any], is_tuned: bool) -> torch.Tensor | None:
    """Ids of tokens that the decoder gets as embeddings; `is_tuned`: PEFT may have put virtual tokens before them."""
    ids, embeds = call.get("input_ids"), call.get("inputs_embeds")
    compared = (around.get("input_ids") if ids is None else ids) if around else None
    if ids is compared is None and embeds is not None and is_tuned:
        # The embeddings identify tokens then, and ids do not.
        return torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    return compared
