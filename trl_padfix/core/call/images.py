"""
Keys that identify a token beyond its id, for prefix sharing: from its embeddings, its features and its prepared masks.

Prefixes of rows match only if their images match.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..layout.flat_maps import to_device_async
from .arguments import visual_mask
from .prepared_masks import PreparedMasks


__all__ = ["content_keys", "tensors_in", "token_keys"]


def content_keys(
    call: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor | None, prepared: PreparedMasks | None
) -> torch.Tensor | None:
    """Keys that identify a token beyond its id, `(keys, B, L)`: [`token_keys`] and the keys of prepared masks."""
    keys = token_keys(call, ids.shape)
    if prepared is None:
        return keys
    input_keys = [] if keys is None else [*keys]
    mask = torch.ones_like(ids) if mask is None else mask
    return torch.cat([*(key[None] for key in input_keys), prepared.keys(mask, [ids, *input_keys])])


def token_keys(call: dict[str, Any], batch_shape: torch.Size) -> torch.Tensor | None:
    """
    Keys that identify a token beyond its id, `(keys, B, L)`, int64: tokens with equal keys have equal inputs.

    Positions and other integers or booleans of a padded `call` are keys without a change. Embeddings and features
    become 64-bit hashes.
    """
    keys: list[torch.Tensor] = []
    is_visual_BL = visual_mask(call, tuple(batch_shape))
    for name, value in call.items():
        # These add no input to the id of a token. `cache_position` counts columns, padding included.
        if name in ("attention_mask", "input_ids", "labels", "cache_position"):
            continue
        if name == "position_ids" and value is not None:
            keys += value.expand(*value.shape[:-2], *batch_shape).reshape(-1, *batch_shape)
            continue
        for tensor in tensors_in(value):
            if tensor.shape[:2] == batch_shape:
                keys.append(tensor if tensor.dim() == 2 and not tensor.is_floating_point() else _content(tensor))
            elif is_visual_BL is not None and tensor.dim() == 2:  # one feature per visual token
                content = _content(tensor.unsqueeze(0))[0]  # `(features,)`, put at the visual tokens
                keys.append(torch.zeros(batch_shape, dtype=torch.int64, device=tensor.device))
                keys[-1][is_visual_BL] = content
    return torch.stack([key.to(torch.int64) for key in keys]) if keys else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, including those in lists and dictionaries."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _content(values: torch.Tensor) -> torch.Tensor:
    """64-bit hash of the values of each token, `(B, L, ...)` to `(B, L)`; about 1 in 2**64 pairs collides."""
    # The bits of the values as integers of the same size: -0.0 and 0.0 differ, and NaN equals itself.
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits_BLH = values.detach().contiguous().view(bits).flatten(2)
    # Sum of the values times odd random factors, modulo 2**64; int64 wraps. An odd factor loses no bits. With a fixed
    # seed the hash is the same on all processes.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, bits_BLH.shape[2:], generator=generator) * 2 + 1
    factors = to_device_async(factors, values.device)
    # Row by row, because the products need 8 bytes per value.
    return torch.stack([(row.to(torch.int64) * factors).sum(1) for row in bits_BLH])
