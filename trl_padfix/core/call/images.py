"""
Inputs of a decoder beyond token ids: features of images and other media, and masks prepared by the module around it.

Prefixes of rows match only if their images match, so the keys that identify a token include its embeddings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ..layout.flat_maps import to_device_async
from ..model.older import has_cache, masks_of_decoder
from .prepared_masks import PreparedMasks, as_bool_mask, by_kind


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["content_keys", "plain_mask", "tensors_in", "token_keys", "visual_mask"]


def visual_mask(call: dict[str, Any], batch_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Mask of the visual tokens, `(B, L)`, if the call has one; features are then in the order of these tokens."""
    tensors = [v for k, v in call.items() if isinstance(v, torch.Tensor) and k != "attention_mask"]
    return next((x for x in tensors if x.dtype == torch.bool and tuple(x.shape) == tuple(batch_shape)), None)


def content_keys(
    call: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor | None, prepared: PreparedMasks | None
) -> torch.Tensor | None:
    """Keys that identify a token beyond its id, `(keys, B, L)`: [`token_keys`] and those of prepared masks."""
    keys = token_keys(call, ids.shape)
    if prepared is None:
        return keys
    input_keys = [] if keys is None else [*keys]
    mask = torch.ones_like(ids) if mask is None else mask
    return torch.cat([*(key[None] for key in input_keys), prepared.keys(mask, [ids, *input_keys])])


def token_keys(call: dict[str, Any], batch_shape: torch.Size) -> torch.Tensor | None:
    """
    Keys that identify a token beyond its id, `(keys, B, L)`, int64: tokens with equal keys have equal inputs.

    Positions and other integers or booleans of a padded `call` are keys as they are. Embeddings and features become
    64-bit hashes.
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
        masks, usual = by_kind(prepared), by_kind(masks_of_decoder(decoder.config, embeds, mask))
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
    a, b = (causal if x is None else x.bool() if x.dim() == 2 else as_bool_mask(x) for x in (a_mask, b_mask))
    padding = mask[:, None, :, None] == 0 if a.dim() == 4 else False
    return a.shape == b.shape and bool(((a == b) | padding).all())


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
