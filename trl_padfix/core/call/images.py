"""
What a decoder is given beside text: the content of images and other features, and masks made around it.

Prefixes of rows match only if their images match, so the keys that identify each token hold its embeddings too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..layout.flat_maps import to_device_async
from ..model.older import own_masks
from .prepared_masks import PreparedMasks, by_kind, visible


__all__ = ["content_keys", "plain_mask", "tensors_in", "token_keys", "visual_mask"]


def visual_mask(call: dict[str, Any], batch_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Where the visual tokens are, `(B, L)`, if the decoder is told: it then takes features in their order."""
    masks = [v for k, v in call.items() if isinstance(v, torch.Tensor) and k != "attention_mask"]
    return next((m for m in masks if m.dtype == torch.bool and tuple(m.shape) == tuple(batch_shape)), None)


def content_keys(
    call: dict[str, Any], ids: Any, mask: torch.Tensor | None, prepared: PreparedMasks | None
) -> torch.Tensor | None:
    """What identifies a token beside its id: positions, embeddings, features ([`token_keys`]), and what it sees."""
    keys = token_keys(call, ids.shape)
    if prepared is None:
        return keys
    given = [] if keys is None else [*keys]
    mask = torch.ones_like(ids) if mask is None else mask
    return torch.cat([*(key[None] for key in given), prepared.keys(mask, [ids, *given])])


def token_keys(call: dict[str, Any], batch_shape: torch.Size) -> torch.Tensor | None:
    """
    Keys that identify each token beside its id, `(keys, B, L)`, int64: tokens with equal keys are given equal inputs.

    They are the positions and (bool or integer) values of a padded `call` as they are, and 64 bits of the content of
    embeddings and features.
    """
    keys: list[torch.Tensor] = []
    mask_BL = visual_mask(call, tuple(batch_shape))
    for name, value in call.items():
        if name in ("attention_mask", "input_ids", "labels", "cache_position"):
            continue
        if name == "position_ids" and value is not None:
            keys += value.expand(*value.shape[:-2], *batch_shape).reshape(-1, *batch_shape)
            continue
        for tensor in tensors_in(value):
            if tensor.shape[:2] == batch_shape:
                keys.append(tensor if tensor.dim() == 2 and not tensor.is_floating_point() else _content(tensor))
            elif mask_BL is not None and tensor.dim() == 2:  # a feature for each visual token
                content = _content(tensor.unsqueeze(0))[0]
                keys.append(torch.zeros(batch_shape, dtype=torch.int64, device=tensor.device))
                keys[-1][mask_BL] = content
    return torch.stack([key.to(torch.int64) for key in keys]) if keys else None


def plain_mask(
    call: dict[str, Any], around: dict[str, Any], decoder: Any, is_causal: bool = True
) -> tuple[dict[str, Any], PreparedMasks | None]:
    """
    A decoder call with the two-dimensional mask that prepared masks were made of, as the module `around` it has it.

    Beside it the masks themselves if they are other ones than the decoder would make: tokens of an image see each
    other. Of a decoder whose attention is not causal by itself they always are: they alone say what is seen.
    """
    prepared, mask, embeds = call.get("attention_mask"), around.get("attention_mask"), call.get("inputs_embeds")
    cached = call.get("past_key_values") is not None or call.get("use_cache") is True
    is_prepared = isinstance(prepared, dict) or (isinstance(prepared, torch.Tensor) and prepared.dim() == 4)
    if cached or not is_prepared or embeds is None:
        return call, None
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return call, None
    if is_causal:
        given, own = by_kind(prepared), by_kind(own_masks(decoder.config, embeds, mask))
        are_alike = (_same_mask(given[kind], own.get(kind), mask) for kind in given)
        if (None in given) == (None in own) and all(are_alike):
            return call | {"attention_mask": mask}, None
    return call | {"attention_mask": mask}, PreparedMasks.of(prepared)


def _same_mask(prepared: Any, own: Any, mask: torch.Tensor) -> bool:
    """Whether two masks agree on the rows of real tokens. No mask is a causal one of a batch without padding."""
    if prepared is None and own is None:
        return True
    causal = mask.new_ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril().expand(len(mask), 1, -1, -1)
    a, b = (causal if x is None else x.bool() if x.dim() == 2 else visible(x) for x in (prepared, own))
    padding = mask[:, None, :, None] == 0 if a.dim() == 4 else False
    return a.shape == b.shape and bool(((a == b) | padding).all())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, those within lists and dictionaries included."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _content(values: torch.Tensor) -> torch.Tensor:
    """64 bits of the content of `(B, L, ...)`, `(B, L)`: other values give others, but for one pair in 2**64 or so."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits_BLH = values.detach().contiguous().view(bits).flatten(2)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, bits_BLH.shape[2:], generator=generator) * 2 + 1
    factors = to_device_async(factors, values.device)
    return torch.stack([(row.to(torch.int64) * factors).sum(1) for row in bits_BLH])
