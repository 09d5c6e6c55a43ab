"""
Masks that the module around a decoder prepares, in which the tokens of one image see each other in both directions.

Such a mask says for each pair of tokens of a row whether one sees the other. In a packed forward each segment attends
with its part of the mask of its row, however the mask was made. Rows share a prefix only up to a position beyond which
no earlier token sees: they diverge before an image, never inside one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..layout.layout import Layout
from ..model.older import has_cache, masks_of_decoder
from ..model.positions import PackedMask


__all__ = ["PreparedMasks", "plain_mask", "with_added_masks"]


@dataclass(frozen=True, eq=False)
class PreparedMasks:
    """
    Prepared masks of a padded batch.

    Attributes:
        masks (`dict[str | None, torch.Tensor]`):
            Masks `(B, 1, L, L)` by the type of the layers that use them; the key `None` stands for all layers. `True`
            (or 0, in masks that are added to scores) where the query of the row sees the key of the column.
        original:
            The argument that the decoder got, for a call with nothing to pack.
    """

    masks: dict[str | None, torch.Tensor]
    original: Any = None

    @classmethod
    def of(cls, prepared: Any) -> PreparedMasks:
        """Read the argument `attention_mask`: one mask, or a `dict` of masks by layer type. `None` means causal."""
        masks = _by_kind(prepared)
        tensor = next(mask for mask in masks.values() if mask is not None)
        causal = torch.ones(tensor.shape[-2:], dtype=torch.bool, device=tensor.device).tril().expand(tensor.shape)
        return cls({kind: causal if mask is None else mask for kind, mask in masks.items()}, prepared)

    def for_decoder(self) -> Any:
        """The argument of the packed decoder: descriptions in place of the masks, by which attention finds them."""
        return None if None in self.masks else {kind: PackedMask(kind=kind) for kind in self.masks}

    def keys(self, mask_BL: torch.Tensor, other_keys: list[torch.Tensor]) -> torch.Tensor:
        """
        Keys that identify what each token sees, `(masks + 1, B, L)`, int64.

        One key per mask is the hash of the tokens that the token sees. The last key is the hash of the token's
        *block*, a run of tokens that ends where neither its last token nor any token before sees further. Outside of
        images each token is a block. All tokens of a block have the same last key, so rows that are sorted by it
        diverge before the first block in which they differ.

        Args:
            mask_BL (`torch.Tensor` of shape `(B, L)`): 1 for real tokens.
            other_keys (`list` of `torch.Tensor` of shape `(B, L)`): The other keys of the tokens.
        """
        L = mask_BL.shape[1]
        # Odd random factors for hashes, as in `layout_of._content`, with another seed: the hashes are independent.
        generator = torch.Generator().manual_seed(1)
        shape = (len(self.masks) + len(other_keys) + 1, L)
        factors = (torch.randint(-(2**62), 2**62, shape, generator=generator) * 2 + 1).to(mask_BL.device)
        rows = []
        for b, real in enumerate(mask_BL.bool()):
            # Index of each token among the real ones of its row: keys must not depend on the side of the padding.
            rank = (real.cumsum(0) - 1).clamp(min=0)
            furthest, mask_keys = rank, []
            for mask in self.masks.values():
                sees = _as_bool_mask(mask[b, 0]) & real[None, :] & real[:, None]
                mask_keys.append((sees * factors[0, rank]).sum(1))
                furthest = torch.maximum(furthest, (sees * rank).amax(1))
            keys = [*mask_keys, *(key[b] for key in other_keys)]
            content = sum((key * factors[i + 1, rank] for i, key in enumerate(keys)), torch.zeros_like(rank)) * real
            # A block ends with the first token beyond which neither it nor any earlier token sees.
            ends = (furthest.cummax(0).values == rank) & real
            block = ends.cumsum(0) - ends.long()
            block_sums = torch.zeros(L + 1, dtype=content.dtype, device=content.device).index_add_(0, block, content)
            rows.append(torch.stack([*mask_keys, block_sums[block]]))
        return torch.stack(rows, dim=1)

    def of_segments(self, kind: str | None, layout: Layout) -> list[torch.Tensor]:
        """The part of the mask for each segment: `(1, 1, queries, keys)`, `True` where the query sees the key."""
        mask, L = self.masks[None if None in self.masks else kind], layout.batch_shape[1]
        # A segment is the end of a row, and its keys are the real tokens of that row up to there.
        rows = (layout.packed_index[layout.queries.cu_seqlens[:-1].long()] // L).tolist()
        begins = torch.searchsorted(layout.real_index, torch.tensor(rows, device=layout.real_index.device) * L)
        segment_masks = []
        lengths = zip(layout.queries.lengths, layout.keys.lengths, strict=True)
        for row, begin, (queries, keys) in zip(rows, begins.tolist(), lengths, strict=True):
            columns = layout.real_index[begin : begin + keys] - row * L
            segment_masks.append(_as_bool_mask(mask[row])[:, columns[-queries:]][:, :, columns][None])
        return segment_masks


def plain_mask(
    call: dict[str, Any], around: dict[str, Any], decoder: PreTrainedModel, is_causal: bool = True
) -> tuple[dict[str, Any], PreparedMasks | None]:
    """
    Replace prepared masks in a decoder call by the two-dimensional mask that they were made from.

    Args:
        call (`dict`):
            Arguments of the decoder.
        around (`dict`):
            Arguments of the module around it, which has the two-dimensional mask.
        decoder (`PreTrainedModel`):
            The decoder.
        is_causal (`bool`, *optional*, defaults to `True`):
            Whether the decoder's attention is causal without a mask.

    Returns:
        The call, and [`PreparedMasks`] if the masks differ from those that the decoder would make: tokens of one image
        see each other. If the attention is not causal without a mask, the prepared masks are always returned.
    """
    prepared, mask, embeds = call.get("attention_mask"), around.get("attention_mask"), call.get("inputs_embeds")
    is_prepared = isinstance(prepared, dict) or (isinstance(prepared, torch.Tensor) and prepared.dim() == 4)
    if has_cache(call) or not is_prepared or embeds is None:
        return call, None
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return call, None
    if is_causal:
        masks, usual = _by_kind(prepared), _by_kind(masks_of_decoder(decoder.config, embeds, mask))
        are_equal = (_same_mask(masks[kind], usual.get(kind), mask) for kind in masks)
        if (None in masks) == (None in usual) and all(are_equal):
            return call | {"attention_mask": mask}, None
    return call | {"attention_mask": mask}, PreparedMasks.of(prepared)


def _same_mask(a_mask: torch.Tensor | None, b_mask: torch.Tensor | None, mask: torch.Tensor) -> bool:
    """Whether two masks agree for all queries that are real tokens. `None` is a causal mask without padding."""
    if a_mask is None and b_mask is None:
        return True
    causal = mask.new_ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril().expand(len(mask), 1, -1, -1)
    # Flash attention takes the two-dimensional mask itself.
    a, b = (causal if x is None else x.bool() if x.dim() == 2 else _as_bool_mask(x) for x in (a_mask, b_mask))
    padding = mask[:, None, :, None] == 0 if a.dim() == 4 else False
    return a.shape == b.shape and bool(((a == b) | padding).all())


def with_added_masks(prepared: Any, dtype: torch.dtype) -> Any:
    """Prepared masks in the form that eager attention adds to its scores: 0 and the lowest number of `dtype`."""
    if isinstance(prepared, dict):
        return {kind: with_added_masks(mask, dtype) for kind, mask in prepared.items()}
    if not isinstance(prepared, torch.Tensor) or prepared.dtype != torch.bool or prepared.dim() != 4:
        return prepared
    return torch.zeros_like(prepared, dtype=dtype).masked_fill_(~prepared, torch.finfo(dtype).min)


def _by_kind(prepared: Any) -> dict[str | None, Any]:
    """Prepared masks by the type of the layers that use them; the key `None` stands for all layers."""
    return prepared if isinstance(prepared, dict) else {None: prepared}


def _as_bool_mask(mask: torch.Tensor) -> torch.Tensor:
    """A prepared mask as booleans, `True` where a key is seen; masks that are added to scores have 0 there."""
    return mask if mask.dtype == torch.bool else mask == 0
