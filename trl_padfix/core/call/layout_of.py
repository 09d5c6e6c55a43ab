"""
The layout of a decoder call: one of three kinds, each with its builder.

- `plain`: padding is left out, and the sequences of packed rows are kept apart;
- `shared`: in addition prefixes that rows have in common are computed once, if that saves time;
- `tree`: the segments of a row with `tree_*` arguments attend to their paths.

Prefixes of rows match only if their images match: keys identify a token beyond its id, from its embeddings, its
features ([`token_keys`]) and its prepared masks.

A layout is built once for the forwards of a loss on the same tensors (`batch_cache.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ..context import context
from ..errors import PaddingRemovalError, UnpackableBatchError, UnpackableCallError
from ..layout.build import packed_layout, padding_free_layout, prefix_sharing_layout, tree_layout
from ..layout.layout import Layout, to_device_async
from ..layout.shared_prefixes import PrefixedLayout
from ..model.older import CACHES
from .arguments import DecoderInputs, draws_noise, visual_mask
from .batch_cache import cached_layout, on_host
from .calls import CALL


if TYPE_CHECKING:
    from ..handle import PaddingRemoval


__all__ = ["check_mask", "layout_of", "tensors_in", "token_keys"]


def layout_of(inputs: DecoderInputs, handle: PaddingRemoval) -> Layout | None:
    """
    The layout of a decoder call.

    Args:
        inputs ([`DecoderInputs`]):
            Inputs of the decoder.
        handle ([`PaddingRemoval`]):
            Handle with the settings.

    Returns:
        [`Layout`], or `None` if the call must run unchanged.

    Raises:
        UnpackableCallError: If the call cannot be packed.
    """
    if (layout := _unfilled(inputs, handle)) is None:
        return None
    group, lengths = handle.context_parallel, handle.packed_multiple_of
    if lengths is None or (isinstance(layout, PrefixedLayout) and layout.new is None):
        return layout
    lengths = [lengths] if isinstance(lengths, int) else lengths
    # Each process of a context-parallel group gets an equal part of the row, which is then a multiple itself.
    return layout.filled([n * (1 if group is None else group.size) for n in lengths])


def _unfilled(inputs: DecoderInputs, handle: PaddingRemoval) -> Layout | None:
    """[`layout_of`] without filler: [`_of_rows`], [`_shared`] or [`_tree`]."""
    if inputs.tree:
        return _tree(inputs, handle)
    batch, mask = inputs.batch, inputs.mask
    if CALL in inputs.arguments or any(inputs.arguments.get(name) is not None for name in CACHES):
        return None  # as in generation, or within a packed call
    if inputs.arguments.get("use_cache") is True:
        # A padded training batch that asks for a cache; no generation begins like this.
        is_padded_batch = isinstance(mask, torch.Tensor) and mask.dim() == 2
        if is_padded_batch and torch.is_grad_enabled() and not on_host(mask)[0].bool().all():
            raise UnpackableCallError(
                "use_cache",
                "The model was called with `use_cache=True`: a packed forward has no rows whose cache a later call "
                "could continue. Leave `use_cache` out of a loss.",
            )
        return None
    if inputs.arguments.get("encoder_hidden_states") is not None:
        raise UnpackableCallError(
            "encoder_hidden_states",
            "The decoder was called with `encoder_hidden_states`: its cross-attention reads another sequence "
            "for each row, and a packed batch has no rows. Run this call inside `with handle.disabled():`.",
        )
    if (ids := inputs.any_ids) is not None and ids.dim() != 2:
        raise UnpackableCallError(
            "shape of ids",
            f"The decoder was called with ids of shape {tuple(ids.shape)}. Padding is removed from ids of shape "
            "`(B, L)`. Flatten the dimensions before the last one, or run this call inside `with handle.disabled():`.",
        )
    if (positions := inputs.positions) is not None and positions.dim() < 2:
        raise ValueError(f"`position_ids` have shape {tuple(positions.shape)}: pass `(B, L)` or `(1, L)`.")
    # A mask and `cu_seqlens` together are ambiguous: such a call runs unchanged.
    if batch is None or (mask is not None and inputs.cu_seqlens is not None):
        return None
    if mask is None and not inputs.is_packed and handle.prefix_sharing and len(batch) == 1:
        return None  # neither padding nor a second row to share with; such calls may begin a loop that keeps the cache
    if mask is not None:
        check_mask(mask, batch)
    if not handle.prefix_sharing:
        return _of_rows(inputs, handle)
    by_embeddings = inputs.compared_ids is not None and not inputs.is_packed
    is_noisy = inputs.ids is not None and draws_noise(handle.decoder)
    obstacle = _sharing_obstacle(inputs, is_noisy) if is_noisy or not by_embeddings else None
    # `positions` show where the sequences of a pre-packed batch begin, so they cannot hold other keys as well.
    if obstacle is None and not (inputs.is_packed and _other_keys(inputs)):
        return _shared(inputs, handle)
    if handle.prefix_sharing is True and obstacle is not None:
        if handle.is_strict:
            raise UnpackableCallError("prefix sharing", obstacle)
        handle.say_once(f"Padding is removed from a call, but no prefix is shared. {obstacle}", "prefix sharing")
    return _of_rows(inputs, handle)


def _of_rows(
    inputs: DecoderInputs, handle: PaddingRemoval, ids: torch.Tensor | None = None, keys: torch.Tensor | None = None
) -> Layout | None:
    """
    The layout of padded or packed rows, on the device of the batch. If the host has not read their tensors, it waits
    for the device once.

    Args:
        inputs ([`DecoderInputs`]):
            Inputs of the decoder.
        handle ([`PaddingRemoval`]):
            Handle with the settings. Its `token_budget` counts shared tokens once: prefixes are also shared where the
            packed row would otherwise exceed it.
        ids (`torch.Tensor` of shape `(B, L)`, *optional*):
            Ids that are compared. If given, prefixes are shared if that saves time.
        keys (`torch.Tensor` of shape `(B, L)` or `(P, B, L)`, *optional*):
            Further keys to compare, if equal ids can have different inputs.
    """
    if inputs.is_packed:
        keys = inputs.positions  # they show where the sequences begin
    planned = context().planned
    if planned is not None and keys is None and planned.batch.matches(inputs.ids if ids is None else ids, inputs.mask):
        return planned.layout
    assert inputs.batch is not None
    (B, L), is_packed, budget = inputs.batch.shape[:2], inputs.is_packed, handle.token_budget

    def build(ids: Any, mask: Any, keys: Any, cu_seqlens: Any) -> Layout:
        if is_packed:
            columns = (torch.arange(L) if keys is None else keys).expand(B, L)
            layout = packed_layout(columns, cu_seqlens=cu_seqlens, input_ids=ids)
        else:
            mask = torch.ones(B, L, dtype=torch.int64) if mask is None else mask
            layout = padding_free_layout(mask) if ids is None else prefix_sharing_layout(ids, mask, keys)
        if ids is None or layout.sharing_pays or (budget is not None and layout.real_tokens > budget):
            return layout
        return build(None, mask, keys, cu_seqlens)

    tensors = [ids, inputs.mask, keys, inputs.cu_seqlens]
    layout = cached_layout((B, L, ids is not None, is_packed, budget), tensors, inputs.batch.device, build)
    return None if is_packed and layout.is_trivial else layout


def _shared(inputs: DecoderInputs, handle: PaddingRemoval) -> Layout | None:
    ids, keys = inputs.batch, inputs.positions
    if inputs.compared_ids is not None and not inputs.is_packed:  # embeddings are among the keys of the tokens
        ids, found = inputs.compared_ids, token_keys(inputs.arguments, inputs.compared_ids.shape)
        if inputs.prepared is not None:
            mask = torch.ones_like(ids) if inputs.mask is None else inputs.mask
            found += inputs.prepared.keys(mask, [ids, *found])
        if found and inputs.embeds is not None and inputs.embeds.requires_grad and inputs.images:
            found.append(_rows_of_equal_features(ids, inputs.embeds))
        keys = torch.stack(found) if found else None
    elif (others := _other_keys(inputs)) and ids is not None:
        keys = torch.stack(token_keys({"position_ids": inputs.positions, **others}, ids.shape))
    return _of_rows(inputs, handle, ids, keys)


def _rows_of_equal_features(ids: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """
    A key, `(B, L)`, that keeps tokens of rows apart where four tokens in a row have one id and equal embeddings.

    A projector that begins with zeros gives all images equal features, but each image has a gradient of its own.
    """
    same = (embeds[:, 1:] == embeds[:, :-1]).all(2) & (ids[:, 1:] == ids[:, :-1])
    runs = torch.nn.functional.pad(same.long(), (3, 3)).unfold(1, 3, 1).amin(2)  # of three pairs: four tokens
    return runs.unfold(1, 4, 1).amax(2) * torch.arange(1, len(ids) + 1, device=ids.device)[:, None]


def _tree(inputs: DecoderInputs, handle: PaddingRemoval) -> Layout:
    """The layout of a tree row; prefix sharing computes the copies of a token once."""
    batch, ids = inputs.batch, inputs.any_ids
    if (reason := _tree_obstacle(inputs)) is not None or batch is None:
        raise PaddingRemovalError(f"The model was called with {sorted(inputs.tree)}, and {reason}.")
    is_shared = ids is not None and handle.prefix_sharing and not draws_noise(handle.decoder)
    keys = [ids, *token_keys(inputs.arguments, ids.shape)] if ids is not None and is_shared else []
    with torch.inference_mode(False):  # as in `cached_layout`
        return tree_layout(inputs.tree, batch.shape[1], keys)


def _sharing_obstacle(inputs: DecoderInputs, is_noisy: bool) -> str | None:
    """Why the rows of a call cannot share prefixes; `None` if they can."""
    if (ids := inputs.ids) is None:
        return (
            "`prefix_sharing=True` compares token ids, and the decoder was called with `inputs_embeds`. Attach "
            "with `prefix_sharing=False`: padding is removed all the same."
        )
    if is_noisy:
        return (
            "`neftune_noise_alpha` gives each token of each row its own noise, so no two rows begin the same. Set "
            "`prefix_sharing=False`: padding is still removed, with the noise of the padded batch."
        )
    # Floating-point tensors of any shape: features of images, for example, differ for equal ids.
    others = [
        name
        for name, x in inputs.others.items()
        if (x.is_floating_point() and x.dim() > 1) or (x.dim() > 2 and x.shape[:2] == ids.shape)
    ]
    if others:
        return (
            f"`prefix_sharing=True` compares token ids and positions, and the call also carries {others} for each "
            "token. Attach with `prefix_sharing=False`, or leave them out."
        )
    return None


def _other_keys(inputs: DecoderInputs) -> dict[str, torch.Tensor]:
    """Values `(B, L)` besides ids and positions, such as `token_type_ids`: tokens that differ there are not shared."""
    return {k: v for k, v in inputs.others.items() if inputs.ids is not None and v.shape == inputs.ids.shape}


def _tree_obstacle(inputs: DecoderInputs) -> str | None:
    """Why a tree row cannot be computed. Unchanged, such a call would attend over the row without its tree."""
    if (batch := inputs.batch) is None or len(batch) != 1:
        return f"a tree is one row, the batch has {'none' if batch is None else len(batch)}: pass `input_ids` `(1, N)`"
    if inputs.given_mask is not None:
        return "with an attention mask. A tree row holds no padding: leave the mask out"
    caches = [k for k in (*CACHES, "use_cache") if inputs.arguments.get(k) not in (None, False)]
    if extra := [*caches, *inputs.images]:
        return f"with {extra}. A tree row has neither a cache nor images: leave them out"
    return None


def check_mask(mask: Any, batch: torch.Tensor) -> None:
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
        if mask.shape[1] > batch.shape[1] == 1:  # a loop that decodes would continue from wrong tokens
            raise ValueError(
                f"The attention mask has {mask.shape[1]} columns for one new token, and there is no cache: packed "
                "forwards return none. To decode, pass `use_cache=True` in each call, or call the model inside `with "
                "handle.disabled():`."
            )
        raise UnpackableBatchError(
            "shape of the mask",
            f"The attention mask has shape {tuple(mask.shape)} and the batch {tuple(batch.shape[:2])}. Without a "
            "cache they must be the same `(B, L)`. A packed forward returns no cache: to decode, pass "
            "`use_cache=True`.",
        )


def token_keys(call: dict[str, Any], batch_shape: torch.Size) -> list[torch.Tensor]:
    """
    Keys that identify a token beyond its id, each `(B, L)`, int64: tokens with equal keys have equal inputs.

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
    return [key.to(torch.int64) for key in keys]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, including those in lists and dictionaries."""
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _content(values: torch.Tensor) -> torch.Tensor:
    """64-bit hash of the values of each token, `(B, L, ...)` to `(B, L)`; about 1 in 2**64 pairs collides."""
    # The bits of the values as integers of the same size: -0.0 and 0.0 differ, and NaN equals itself.
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits_BLH = values.detach().contiguous().view(bits).reshape(*values.shape[:2], -1)  # one value is a row of one
    # Sum of the values times odd random factors, modulo 2**64; int64 wraps. An odd factor loses no bits. With a fixed
    # seed the hash is the same on all processes.
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, bits_BLH.shape[2:], generator=generator) * 2 + 1
    factors = to_device_async(factors, values.device)
    # Row by row, because the products need 8 bytes per value.
    return torch.stack([(row.to(torch.int64) * factors).sum(1) for row in bits_BLH])
