"""
The layout of a decoder call.

A [`LayoutInputs`] holds the tensors that a layout is built from, and builds it, once for the forwards of a loss on the
same tensors (`batch_cache.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..context import context
from ..errors import PaddingRemovalError, UnpackableBatchError, UnpackableCallError
from ..layout.build import packed_layout, padding_free_layout, prefix_sharing_layout
from ..layout.layout import Layout
from ..layout.tree_arguments import tree_arguments_in, tree_layout
from ..model.older import CACHES, has_cache
from .batch_cache import cached_layout, on_host
from .calls import LAYOUT, ModelCall
from .images import content_keys, token_keys
from .prepared_masks import PreparedMasks


if TYPE_CHECKING:
    from ..handle import PaddingRemoval


__all__ = ["LayoutInputs", "Lengths", "PrefixSharing", "check_multiple", "check_prefix_sharing", "layout_of"]

PrefixSharing = bool | Literal["auto"]
"""Whether shared prefixes are computed once; with `"auto"` only where this is possible and saves time."""

Lengths = int | Sequence[int]
"""Lengths of packed rows: multiples of one number, or one of several numbers in ascending order."""


def check_prefix_sharing(prefix_sharing: Any) -> None:
    """Raise a `ValueError` for a value that `prefix_sharing` cannot have."""
    if not isinstance(prefix_sharing, bool) and prefix_sharing != "auto":
        raise ValueError(f"`prefix_sharing` is True, False or 'auto', got {prefix_sharing!r}.")


def check_multiple(packed_multiple_of: Any) -> None:
    """Raise a `ValueError` for a value that `packed_multiple_of` cannot have."""
    if packed_multiple_of is None:
        return
    lengths = packed_multiple_of if isinstance(packed_multiple_of, list | tuple) else [packed_multiple_of]
    are_numbers = lengths and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in lengths)
    if not are_numbers or any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(
            "`packed_multiple_of` is a number of tokens, such as 64 or 128, a list of lengths in ascending order, "
            f"such as [1024, 2048, 4096], or None; got {packed_multiple_of!r}."
        )


_COVERED_BY_IDS = {"input_ids", "attention_mask", "position_ids", "labels", "seq_idx", "completion_mask"}
"""Per-token arguments that are equal, or do not matter to the decoder, wherever ids and positions are equal."""


@dataclass(frozen=True, eq=False)
class LayoutInputs:
    """
    The tensors and settings that a layout is built from.

    Attributes:
        ids (`torch.Tensor` of shape `(B, L)`, *optional*):
            Token ids. For a packed batch without ids its embeddings, `(B, L, H)`.
        mask (`torch.Tensor` of shape `(B, L)`, *optional*):
            1 for real tokens; `None` if all tokens are real.
        positions (`torch.Tensor` of shape `(B, L)` or `(P, B, L)`, *optional*):
            Positions; with other keys (token types, embeddings), if equal ids can have different inputs.
        cu_seqlens (`torch.Tensor` of shape `(S + 1,)`, *optional*):
            Where the sequences of a packed batch begin and end.
        shares (`bool`):
            Whether shared prefixes are computed once, if that saves time.
        is_packed (`bool`):
            Whether the batch arrives packed, with several sequences per row.
    """

    ids: torch.Tensor | None
    mask: torch.Tensor | None
    positions: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    shares: bool = False
    is_packed: bool = False

    @classmethod
    def read(
        cls,
        arguments: Mapping[str, Any],
        *,
        prefix_sharing: PrefixSharing = False,
        packs_padded: bool = True,
        takes_positions: bool = True,
        ids_around: torch.Tensor | None = None,
    ) -> LayoutInputs | None:
        """
        Read the arguments of a decoder, or the batch that they will come from.

        Args:
            arguments (`Mapping[str, Any]`):
                The arguments, or the batch.
            prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
                Whether shared prefixes are computed once.
            packs_padded (`bool`, *optional*, defaults to `True`):
                Whether padded batches are packed. If not, only the sequences of a packed batch are kept apart.
            takes_positions (`bool`, *optional*, defaults to `True`):
                Whether the decoder takes positions, which tell that a batch is packed.
            ids_around (`torch.Tensor` of shape `(B, L)`, *optional*):
                Ids to compare beside embeddings: those from which the module around the decoder made them.

        Returns:
            [`LayoutInputs`], or `None` if there is nothing to pack.

        Raises:
            UnpackableCallError: If the mask is not `(B, L)`.
            ValueError: If the mask is on another device, or requires a gradient.
        """
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        cu_seqlens = arguments.get("cu_seq_lens_q")
        batch = ids if ids is not None else arguments.get("inputs_embeds")
        # A mask and `cu_seqlens` together are ambiguous: such a call runs unchanged.
        if batch is None or (mask is not None and (cu_seqlens is not None or not packs_padded)):
            return None
        positions = arguments.get("position_ids")
        is_packed = mask is None and takes_positions and (cu_seqlens is not None or positions is not None)
        # Positions of several axes (M-RoPE) repeat and skip numbers inside of images: they show no beginning.
        if is_packed and (positions is None or positions.dim() == 2):
            # `positions` show where the sequences of a packed batch begin, so they cannot hold other keys as well.
            shares = bool(prefix_sharing) and not (sharing_obstacle(arguments) or _other_keys(arguments))
            return cls(batch, None, positions, cu_seqlens, shares, is_packed=True)
        if mask is None and (not prefix_sharing or batch.shape[0] == 1):
            return None  # neither padding nor a second row to share with
        if mask is not None:
            _check_mask(mask, batch)
        # The decoder gets embeddings here. `layout_of` adds keys for their content.
        if prefix_sharing and ids_around is not None:
            return cls(ids_around, mask, shares=True)
        if prefix_sharing and ids is not None and not sharing_obstacle(arguments):
            if others := _other_keys(arguments):
                positions = token_keys({"position_ids": positions, **others}, ids.shape)
            return cls(ids, mask, positions, shares=True)
        return cls(ids, torch.ones(batch.shape[:2], dtype=torch.int64, device=batch.device) if mask is None else mask)

    def build(self, token_budget: int | None = None) -> Layout:
        """
        The layout, on the device of the tensors. If the host has not read them, it waits for the device once.

        Prefixes are shared if that saves time, or if the packed row would otherwise exceed `token_budget`, whose rows
        were chosen with shared tokens counted once.
        """
        batch = self.mask if self.ids is None else self.ids
        assert batch is not None
        shape, reads_positions = (batch.shape[0], batch.shape[1]), self.shares or self.is_packed
        ids, positions = self.ids if self.shares else None, self.positions if reads_positions else None
        tensors = [ids, self.mask, positions, self.cu_seqlens]

        def build() -> Layout:
            with torch.inference_mode(False):  # a later forward with gradients cannot use inference tensors
                ids, mask, positions, cu_seqlens = on_host(*tensors)
                if mask is None and not self.is_packed:
                    mask = torch.ones(shape, dtype=torch.int64)
                layout = _build(shape, ids, mask, positions, cu_seqlens)
                if ids is not None and not layout.sharing_pays:
                    exceeds_budget = token_budget is not None and layout.real_tokens > token_budget
                    layout = layout if exceeds_budget else _build(shape, None, mask, positions, cu_seqlens)
                return layout.to(batch.device)

        return cached_layout((shape, self.shares, self.is_packed, token_budget), tensors, build)


def _build(
    shape: tuple[int, int],
    ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Layout:
    """The layout of tensors on the host: of a packed batch if they have no mask; with `ids` prefixes are shared."""
    if mask is None:
        columns = (torch.arange(shape[1]) if positions is None else positions).expand(shape)
        return packed_layout(columns, cu_seqlens=cu_seqlens, input_ids=ids)
    return padding_free_layout(mask) if ids is None else prefix_sharing_layout(ids, mask, positions)


def layout_of(
    call: dict[str, Any],
    handle: PaddingRemoval,
    model_call: ModelCall | None = None,
    prepared: PreparedMasks | None = None,
) -> Layout | None:
    """
    The layout of a decoder call.

    Args:
        call (`dict`):
            Arguments of the decoder, by name.
        handle ([`PaddingRemoval`]):
            Handle with the settings.
        model_call ([`ModelCall`], *optional*):
            Call of the module around the decoder, which has the ids if the decoder gets embeddings.
        prepared ([`PreparedMasks`], *optional*):
            Masks that the decoder got, if tokens see more in them than in the decoder's own masks.

    Returns:
        [`Layout`], or `None` if the call must run unchanged.

    Raises:
        UnpackableCallError: If the call cannot be packed.
        ValueError: If the mask is on another device, or requires a gradient.
    """
    around = model_call.outer_arguments if model_call is not None else {}
    ids = call["input_ids"] if call.get("input_ids") is not None else around.get("input_ids")
    if LAYOUT not in call and (tree := tree_arguments_in(call)):
        return _layout_of_tree(call, tree, ids, around, handle)
    _refuse_new_cache(call, handle)
    if has_cache(call) or LAYOUT in call:
        return None  # a call with a cache, as in generation, or one that is packed already
    if call.get("encoder_hidden_states") is not None:
        raise UnpackableCallError(
            "encoder_hidden_states",
            "The decoder was called with `encoder_hidden_states`: its cross-attention reads another sequence "
            "for each row, and a packed batch has no rows. Run this call inside `with handle.disabled():`.",
        )
    if isinstance(ids, torch.Tensor) and ids.dim() != 2:
        raise UnpackableCallError(
            "shape of ids",
            f"The decoder was called with ids of shape {tuple(ids.shape)}. Padding is removed from ids of shape "
            "`(B, L)`. Flatten the dimensions before the last one, or run this call inside `with handle.disabled():`.",
        )
    embeds, compares_embeds = call.get("inputs_embeds"), bool(around)
    if ids is None and isinstance(embeds, torch.Tensor) and handle.anatomy.has_virtual_tokens:
        # PEFT puts the virtual tokens before the embeddings of the rows: embeddings identify tokens, their ids do not.
        ids, compares_embeds = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device), True
    inputs = LayoutInputs.read(
        call,
        prefix_sharing=handle.prefix_sharing,
        packs_padded=handle.packs_padded,
        takes_positions=handle.takes_positions,
        ids_around=ids if compares_embeds else None,
    )
    if inputs is None:
        return None
    if handle.prefix_sharing is True and not inputs.shares:
        handle.report_unshared(sharing_obstacle(call))
    if compares_embeds and inputs.shares and not inputs.is_packed:  # the embeddings are among the keys of the tokens
        assert inputs.ids is not None
        inputs = replace(inputs, positions=content_keys(call, inputs.ids, inputs.mask, prepared))
    planned = context().planned
    if planned is not None and inputs.positions is None and planned[0].matches(inputs.ids, inputs.mask):
        return planned[1]
    layout = inputs.build(handle.token_budget)
    return None if inputs.is_packed and layout.is_trivial else layout


def _refuse_new_cache(call: dict[str, Any], handle: PaddingRemoval) -> None:
    """Raise an error if a padded batch that is trained on shall begin a cache, as no generation does."""
    mask = call.get("attention_mask")
    begins_cache = call.get("use_cache") is True and all(call.get(name) is None for name in CACHES)
    is_padded_batch = isinstance(mask, torch.Tensor) and mask.dim() == 2 and handle.packs_padded
    if begins_cache and is_padded_batch and torch.is_grad_enabled() and not on_host(mask)[0].bool().all():
        raise UnpackableCallError(
            "use_cache",
            "The model was called with `use_cache=True`: a packed forward has no rows whose cache a later call could "
            "continue. Leave `use_cache` out of a loss.",
        )


def sharing_obstacle(arguments: Mapping[str, Any]) -> str | None:
    """Why the rows of a call, or of a batch, cannot share prefixes; `None` if they can."""
    ids = arguments.get("input_ids")
    if ids is None:
        return (
            "`prefix_sharing=True` compares token ids, and the decoder was called with `inputs_embeds`. Attach "
            "with `prefix_sharing=False`: padding is removed all the same."
        )
    # Floating-point tensors of any shape: features of images, say, differ for equal ids.
    others = [
        name
        for name, x in _other_tensors(arguments)
        if (x.is_floating_point() and x.dim() > 1) or (x.dim() > 2 and x.shape[:2] == ids.shape)
    ]
    if others:
        return (
            f"`prefix_sharing=True` compares token ids and positions, and the call also carries {others} for each "
            "token. Attach with `prefix_sharing=False`, or leave them out."
        )
    return None


def _other_keys(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Values `(B, L)` beside ids and positions, such as `token_type_ids`: tokens that differ there are not shared."""
    ids = arguments.get("input_ids")
    return {} if ids is None else {k: v for k, v in _other_tensors(arguments) if v.shape == ids.shape}


def _other_tensors(arguments: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(k, v) for k, v in arguments.items() if isinstance(v, torch.Tensor) and k not in _COVERED_BY_IDS]


def _layout_of_tree(
    call: dict[str, Any],
    tree: dict[str, Any],
    ids: torch.Tensor | None,
    around: dict[str, Any],
    handle: PaddingRemoval,
) -> Layout:
    """The layout of a call with the `tree_*` arguments `tree`; prefix sharing computes the copies of a token once."""
    batch = ids if ids is not None else call.get("inputs_embeds")
    if (reason := _tree_obstacle(call, around, batch, handle)) is not None or batch is None:
        raise PaddingRemovalError(f"The model was called with {sorted(tree)}, and {reason}.")
    keys: list[torch.Tensor] = []
    if handle.prefix_sharing and ids is not None:
        others = token_keys({k: v for k, v in call.items() if k not in tree}, ids.shape)
        keys = [ids, *([] if others is None else others)]
    with torch.inference_mode(False):  # as in `layout_of`
        return tree_layout(tree, batch.shape[1], keys)


def _tree_obstacle(
    call: dict[str, Any], around: dict[str, Any], batch: torch.Tensor | None, handle: PaddingRemoval
) -> str | None:
    """Why a tree row cannot be computed. Unchanged, such a call would attend over the row without its tree."""
    if batch is None or len(batch) != 1:
        return f"a tree is one row, the batch has {'none' if batch is None else len(batch)}: pass `input_ids` `(1, N)`"
    if (around or call).get("attention_mask") is not None:
        return "with an attention mask. A tree row holds no padding: leave the mask out"
    caches = [k for k in (*CACHES, "use_cache") if call.get(k) not in (None, False)]
    pixels = [k for k, v in around.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if extra := caches + [k for k in pixels if k != "inputs_embeds"]:
        return f"with {extra}. A tree row has neither a cache nor images: leave them out"
    if handle.anatomy.whole_rows:
        return f"{type(handle.decoder).__name__} {handle.anatomy.whole_rows}, so it needs whole rows"
    return None


def _check_mask(mask: Any, batch: torch.Tensor) -> None:
    """Raise an error unless `mask` is a `(B, L)` tensor that fits the batch."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnpackableBatchError(
            "prepared mask",
            f"The model was called with an attention mask of {shape}. Padding is removed by a mask of shape "
            "`(B, L)` with 1 for real tokens; a prepared mask cannot be packed. Pass the two-dimensional mask, or "
            "run this call inside `with handle.disabled():`.",
        )
    if mask.shape != batch.shape[:2]:
        raise UnpackableBatchError(
            "shape of the mask",
            f"The attention mask has shape {tuple(mask.shape)} and the batch {tuple(batch.shape[:2])}. Without a "
            "cache they must be the same `(B, L)`.",
        )
    if mask.device != batch.device:
        raise ValueError(
            f"The attention mask is on {mask.device} and the batch on {batch.device}. Move them to one device."
        )
    if mask.requires_grad:
        raise ValueError("The attention mask requires a gradient; removing padding only reads it. Detach it.")
