"""
The layout of a call of a decoder, and of a batch that its collator has just made.

Both are read in one way: a [`LayoutKey`] holds the tensors that a layout is made of, and makes it. [`layout_of`] takes
the layout that the running step has for these very tensors, or makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from ..context import context
from ..errors import PaddingRemovalError
from ..layout.build import packed_layout, padding_free_layout, prefix_sharing_layout
from ..layout.layout import Layout
from .batch_metadata import BatchFacts, Known
from .calls import LAYOUT, ModelCall
from .images import content_keys
from .prepared_masks import PreparedMasks


__all__ = ["LayoutKey", "PrefixSharing", "layout_of"]

PrefixSharing = bool | Literal["auto"]
"""Whether repeated prefixes are computed once; with `"auto"` where that is possible and pays."""

_ALIKE = {"input_ids", "attention_mask", "position_ids", "labels", "seq_idx", "completion_mask"}
"""Values for each token that tell no two tokens apart whose ids and positions are the same."""


@dataclass(frozen=True, eq=False)
class LayoutKey:
    """What a layout is made of, as far as a call or a batch says it."""

    ids: torch.Tensor | None  # `(B, L)`
    mask: torch.Tensor | None  # `(B, L)`, 1 for real tokens; `None` if all are
    positions: torch.Tensor | None = None  # `(B, L)`, or `(P, B, L)` with other numbers that tell equal ids apart
    bounds: torch.Tensor | None = None  # `(S + 1,)`: where the sequences of rows that arrive packed begin
    shares: bool = False  # prefixes that rows have in common are computed once, where that pays
    is_packed: bool = False  # the rows arrive packed, each with several sequences

    @classmethod
    def read(
        cls,
        given: Mapping[str, Any],
        *,
        prefix_sharing: PrefixSharing = False,
        packs_padded: bool = True,
        takes_positions: bool = True,
        ids_around: torch.Tensor | None = None,
    ) -> LayoutKey | None:
        """
        Read the arguments of a decoder, or the batch that they will come from; `None` if there is nothing to pack.

        With `packs_padded=False` only rows that arrive packed are kept apart; a decoder that `takes_positions` tells
        these by them. `ids_around`, `(B, L)`, are those that the module around a decoder made its embeddings of.

        Raises:
            PaddingRemovalError: If something is given that cannot be packed.
            ValueError: If mask and batch do not fit each other.
        """
        ids, mask, bounds = given.get("input_ids"), given.get("attention_mask"), given.get("cu_seq_lens_q")
        batch = ids if ids is not None else given.get("inputs_embeds")
        if batch is None or (mask is not None and (bounds is not None or not packs_padded)):
            return None
        positions = given.get("position_ids")
        is_packed = mask is None and takes_positions and (bounds is not None or positions is not None)
        if is_packed and (positions is None or positions.dim() == 2):
            return cls(batch, None, positions, bounds, _shares(given, prefix_sharing), is_packed=True)
        if mask is None and (not prefix_sharing or batch.shape[0] == 1):
            return None
        if mask is not None:
            _check_mask(mask, batch)
        if prefix_sharing and ids_around is not None:
            return cls(ids_around, mask, shares=True)
        if _shares(given, prefix_sharing):
            return cls(ids, mask, positions, shares=True)
        return cls(ids, torch.ones(batch.shape[:2], dtype=torch.int64, device=batch.device) if mask is None else mask)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All that it holds, each a tensor or `None`."""
        return self.ids, self.mask, self.positions, self.bounds

    @property
    def needed(self) -> tuple[bool, ...]:
        """Which of its tensors the layout depends on: without sharing, the mask of a padded batch alone."""
        return (self.shares or self.is_packed, True, self.shares or self.is_packed, True)

    def build(self) -> Layout:
        """The layout; where the tensors are on the host, so is it. Elsewhere it costs one synchronisation."""
        ids, mask, positions, bounds = self.tensors
        if self.is_packed:
            columns = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
            plain = partial(packed_layout, columns.expand(ids.shape[:2]), cu_seqlens=bounds)
            sharing = partial(plain, input_ids=ids)
        else:
            mask = torch.ones_like(ids) if mask is None else mask
            plain, sharing = partial(padding_free_layout, mask), partial(prefix_sharing_layout, ids, mask, positions)
        shared = sharing() if self.shares else None
        return shared if shared is not None and shared.sharing_pays else plain()

    def misfits(self, layout: Layout) -> torch.Tensor:
        """The rows of a batch for which a layout is wrong, `(B,)`, bool, found on the device of the batch."""
        ids, mask, positions, bounds = self.tensors
        real, source, shape = layout.real_index, layout.source, layout.batch_shape
        first = layout.positions if source is None else layout.positions[source]
        if not self.is_packed:
            kept = real.new_zeros(layout.padded_tokens).index_fill(0, real, 1)
            wrong = kept != (1 if mask is None else mask.flatten() != 0)
        elif bounds is not None:
            begins = real.new_zeros(layout.padded_tokens + 1).index_fill(0, bounds.long(), 1)[:-1]
            wrong = begins.view(shape).index_fill(1, real.new_zeros(1), 1).flatten() != (first == 0)
        else:
            steps = positions.expand(shape).diff(dim=1, prepend=positions.expand(shape)[:, :1])
            wrong = (steps != 1).flatten() != (first == 0)
        if source is not None:
            computed_by = layout.packed_index[source]
            others = [] if positions is None else [*positions.reshape(-1, *positions.shape[-2:])]
            for values in (x.expand(shape).flatten() for x in (ids, *others)):
                wrong = wrong.index_put((real,), wrong[real] | (values[real] != values[computed_by]))
        return wrong.view(layout.batch_shape).any(1)


def layout_of(
    call: dict[str, Any], handle: Any, model_call: ModelCall | None = None, prepared: PreparedMasks | None = None
) -> Layout | None:
    """
    The layout of a decoder call, by what its `handle` says; `None` if it is to go through as it is.

    `model_call` is that of the module around the decoder, with ids that the decoder itself is not given. `prepared`
    are masks that it was given, if they let tokens see more than its own would.

    Raises:
        PaddingRemovalError: If the call brings something that cannot be packed.
        ValueError: If mask and batch do not fit each other, or the mask cannot be read.
    """
    cached = any(call.get(name) is not None for name in ("past_key_values", "cache"))  # the latter is paged
    if cached or call.get("use_cache") is True or LAYOUT in call:
        return None  # cached: generation, or a caller that asked for the cache; or packed already
    if call.get("encoder_hidden_states") is not None:
        raise PaddingRemovalError(
            "The decoder was called with `encoder_hidden_states`: its cross-attention looks at another sequence "
            "for each row, and a packed batch has no rows. Run this call inside `with handle.disabled():`."
        )
    around = model_call.arguments if model_call is not None else {}
    ids = call["input_ids"] if call.get("input_ids") is not None else around.get("input_ids")
    key = LayoutKey.read(
        call,
        prefix_sharing=handle.prefix_sharing,
        packs_padded=handle.packs_padded,
        takes_positions=handle.takes_positions,
        ids_around=ids if around else None,
    )
    if key is None:
        return None
    if around and key.shares and not key.is_packed:  # by what only this forward has: no step can know it
        return replace(key, positions=content_keys(call, key.ids, key.mask, prepared)).build()
    step = context().step
    layout = step.layout(key) if step is not None else None
    if layout is None:
        with torch.inference_mode(False):  # it may serve a forward with gradients later
            layout = key.build()
        if step is not None:
            step.known.append(Known.of(key, BatchFacts(layout)))
    return None if key.is_packed and layout.is_trivial else layout


def _check_mask(mask: Any, batch: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise PaddingRemovalError(
            f"The model was called with an attention mask of {shape}. Padding is removed by a mask of shape "
            "`(B, L)` with 1 for real tokens; a prepared mask cannot be packed. Pass the two-dimensional mask, or "
            "run this call inside `with handle.disabled():`."
        )
    if mask.shape != batch.shape[:2]:
        raise ValueError(
            f"The attention mask has shape {tuple(mask.shape)} and the batch {tuple(batch.shape[:2])}. Without a "
            "cache they must be the same `(B, L)`."
        )
    if mask.device != batch.device:
        raise ValueError(
            f"The attention mask is on {mask.device} and the batch on {batch.device}. Move them to one device."
        )
    if mask.requires_grad:
        raise ValueError("The attention mask requires a gradient; removing padding only reads it. Detach it.")


def _shares(given: Mapping[str, Any], prefix_sharing: PrefixSharing) -> bool:
    """Whether ids say which tokens are equal; a [`PaddingRemovalError`] if they do not, and `True` was asked for."""
    ids = given.get("input_ids")
    if not prefix_sharing or (ids is None and prefix_sharing == "auto"):
        return False
    if ids is None:
        raise PaddingRemovalError(
            "`prefix_sharing=True` compares token ids, and the decoder was called with `inputs_embeds`. Attach "
            "with `prefix_sharing=False`: padding is removed all the same."
        )
    tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and k not in _ALIKE}
    others = [k for k, v in tensors.items() if v.shape[:2] == ids.shape or (v.is_floating_point() and v.dim() > 1)]
    if others and prefix_sharing != "auto":
        raise PaddingRemovalError(
            f"`prefix_sharing=True` compares token ids and positions, and the call also carries {others} for each "
            "token. Attach with `prefix_sharing=False`, or leave them out."
        )
    return not others
