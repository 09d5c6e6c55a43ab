"""Which token of each row a sequence classifier of transformers scores: the last one that is not the pad token."""

from __future__ import annotations

from typing import NamedTuple

import torch


__all__ = ["Pooled", "pooled_tokens"]


class Pooled(NamedTuple):
    """
    Of each row, on the host: whether the token that is scored is another one than its last, and whether it is padding.

    `pad_token_id` is the pad token by which they were looked for.
    """

    pad_token_id: int | None
    others: tuple[bool, ...]
    padding: tuple[bool, ...]

    @classmethod
    def of(cls, ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None) -> Pooled:
        """What ids and mask say, both `(B, L)`; one synchronisation if they are on a device."""
        others, padding = pooled_tokens(ids, mask, pad_token_id).tolist()
        return cls(pad_token_id, tuple(others), tuple(padding))


def pooled_tokens(ids: torch.Tensor | None, mask: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """`others` and `padding` of [`Pooled`] as a tensor of shape `(2, B)`, where the mask is."""
    column = torch.arange(mask.shape[1], device=mask.device)
    # Without ids or a pad token transformers scores the last column.
    scored = torch.ones_like(mask) if ids is None or pad_token_id is None else ids != pad_token_id
    pooled = (scored * column).argmax(1)
    last = (mask.bool() * column).argmax(1)
    return torch.stack([pooled != last, mask.gather(1, pooled[:, None]).squeeze(1) == 0])
