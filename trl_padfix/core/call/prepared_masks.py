"""
Masks that the module around a decoder prepares: tokens of one image see each other, in both directions.

Such a mask says of every pair of tokens of a row whether one sees the other. A packed forward does not ask how it was
made: each segment attends with the part of it that belongs to the segment's row. Rows share a prefix only up to a
token before which nothing looks further: they part before an image, never inside one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layout.layout import Layout
from ..model.masks import PackedMask


__all__ = ["PreparedMasks", "by_kind", "visible", "with_added_masks"]


@dataclass(frozen=True, eq=False)
class PreparedMasks:
    """
    The masks of a padded batch that a decoder is given: `(B, 1, L, L)`, `True` (or 0, to be added to scores) where a
    token is seen.
    """

    masks: dict[str | None, torch.Tensor]  # by the type of the layers that it is for, `None` for all
    given: Any = None  # as the decoder was given them, for a call that has nothing to pack

    @classmethod
    def of(cls, prepared: Any) -> PreparedMasks:
        """Those that stand in the place of an attention mask: one, or a `dict` by the type of the layers."""
        masks = by_kind(prepared)
        other = next(mask for mask in masks.values() if mask is not None)
        causal = torch.ones(other.shape[-2:], dtype=torch.bool, device=other.device).tril().expand(other.shape)
        return cls({kind: causal if mask is None else mask for kind, mask in masks.items()}, prepared)

    def for_decoder(self) -> Any:
        """What the packed forward of the decoder is given for them: a name by which attention finds each again."""
        return None if None in self.masks else {kind: PackedMask(kind=kind) for kind in self.masks}

    def keys(self, mask_BL: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
        """
        Keys that identify what each token sees, and the whole of the block that sees itself: `(masks + 1, B, L)`.

        `given` are the other keys of a token, each `(B, L)`. Two tokens that agree in their last key are the same
        tokens of the same blocks, so rows that are sorted by it part before a block in which they differ.
        """
        L = mask_BL.shape[1]
        generator = torch.Generator().manual_seed(1)
        shape = (len(self.masks) + len(given) + 1, L)
        factors = (torch.randint(-(2**62), 2**62, shape, generator=generator) * 2 + 1).to(mask_BL.device)
        rows = []
        for b, real in enumerate(mask_BL.bool()):
            rank = (real.cumsum(0) - 1).clamp(min=0)
            furthest, sights = rank, []
            for mask in self.masks.values():
                seen = visible(mask[b, 0]) & real[None, :] & real[:, None]
                sights.append((seen * factors[0, rank]).sum(1))
                furthest = torch.maximum(furthest, (seen * rank).amax(1))
            own = [*sights, *(key[b] for key in given)]
            content = sum((key * factors[i + 1, rank] for i, key in enumerate(own)), torch.zeros_like(rank)) * real
            # A block ends with the first token up to which nothing looks further.
            ends = (furthest.cummax(0).values == rank) & real
            block = ends.cumsum(0) - ends.long()
            whole = torch.zeros(L + 1, dtype=content.dtype, device=content.device).index_add_(0, block, content)
            rows.append(torch.stack([*sights, whole[block]]))
        return torch.stack(rows, dim=1)

    def of_segments(self, kind: str | None, layout: Layout) -> list[torch.Tensor]:
        """The part of each segment of a layout: `(1, 1, queries, keys)`, `True` where a token is seen."""
        mask, L = self.masks[None if None in self.masks else kind], layout.batch_shape[1]
        # A segment is the end of one row, and its keys are that row from its first real token on.
        rows = (layout.packed_index[layout.cu_seqlens_q[:-1].long()] // L).tolist()
        begins = torch.searchsorted(layout.real_index, torch.tensor(rows, device=layout.real_index.device) * L)
        parts = []
        lengths = zip(layout.query_lengths, layout.key_lengths, strict=True)
        for row, begin, (queries, keys) in zip(rows, begins.tolist(), lengths, strict=True):
            columns = layout.real_index[begin : begin + keys] - row * L
            parts.append(visible(mask[row])[:, columns[-queries:]][:, :, columns][None])
        return parts


def with_added_masks(prepared: Any, dtype: torch.dtype) -> Any:
    """Prepared masks as attention that is written out adds them to its scores."""
    if isinstance(prepared, dict):
        return {kind: with_added_masks(mask, dtype) for kind, mask in prepared.items()}
    if not isinstance(prepared, torch.Tensor) or prepared.dtype != torch.bool or prepared.dim() != 4:
        return prepared
    return torch.zeros_like(prepared, dtype=dtype).masked_fill_(~prepared, torch.finfo(dtype).min)


def by_kind(prepared: Any) -> dict[str | None, Any]:
    """Prepared masks by the type of the layers that they are for; by `None` one that is for all."""
    return prepared if isinstance(prepared, dict) else {None: prepared}


def visible(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask lets tokens be seen, as it is or added to scores."""
    return mask if mask.dtype == torch.bool else mask == 0
