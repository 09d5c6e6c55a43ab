"""
The layout of a decoder call.

[`layout_of`] reads it from the mask (and ids) of the call. Within [`step_layouts`] calls that are given the very same
tensors share one layout: the reference's forward takes what the policy's has built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch

from ..errors import PaddingRemovalError
from ..layout.build import packed_layout, padding_free_layout, prefix_sharing_layout
from ..layout.layout import Layout
from .calls import LAYOUT, ModelCall
from .images import token_keys


__all__ = [
    "POOLED",
    "REPEATED",
    "Given",
    "Known",
    "PrefixSharing",
    "known_layout",
    "known_too",
    "layout_of",
    "layout_of_batch",
    "layout_of_given",
    "packed_kind",
    "said_to_repeat",
    "sharing_pays",
    "step_layouts",
]

Given = tuple[torch.Tensor | None, ...]
"""The tensors that a layout is made from."""

Known = tuple[str, Given, Layout]
"""A layout with how it is made (see [`layout_of_given`]), and of what."""

PrefixSharing = bool | Literal["auto"]
"""Whether repeated prefixes are computed once; with `"auto"` where that is possible and pays."""

POOLED = "pooled"
"""Kind under which a step knows what its layout says of the scored tokens of ids and mask."""

REPEATED = "repeated"
"""Kind under which a step knows each tensor of images whose halves are the same, by the word of its layout."""

KEYS_PER_TOKEN = 64
"""Keys that a layer gathers, and whose gradients it adds up, in the time that it takes to compute a token, about."""


def sharing_pays(layout: Layout) -> bool:
    """
    Whether the tokens that a layout saves cost more than the keys that it gathers for it.

    Every layer of the decoder gathers the keys and values of all segments. That is little beside a token that is not
    computed, but it is done for whole rows, however short the prefix is that they share.

    Example:

    ```python
    >>> import torch
    >>> from trl_padfix import prefix_sharing_layout
    >>> from trl_padfix.core.call.layout_of import sharing_pays

    >>> ids = torch.arange(400).view(2, 200)
    >>> ids[1, 0] = ids[0, 0]  # one token of 200 in common
    >>> sharing_pays(prefix_sharing_layout(ids, torch.ones_like(ids)))
    False
    >>> ids[1, :50] = ids[0, :50]
    >>> sharing_pays(prefix_sharing_layout(ids, torch.ones_like(ids)))
    True

    ```
    """
    return (layout.real_tokens - layout.packed_tokens) * KEYS_PER_TOKEN >= layout.gathered_keys


def layout_of(
    call: dict[str, Any],
    *,
    prefix_sharing: PrefixSharing = False,
    packs_padded: bool = True,
    takes_positions: bool = True,
    model_call: ModelCall | None = None,
) -> Layout | None:
    """
    The layout of a decoder call.

    Args:
        call (`dict`):
            Arguments of the decoder, by name.
        prefix_sharing (`bool` or `"auto"`, *optional*, defaults to `False`):
            Whether repeated prefixes are computed once. A batch in which that would cost more than it saves is
            computed without ([`sharing_pays`]); with `"auto"` also one whose tokens cannot be told apart by ids.
        packs_padded (`bool`, *optional*, defaults to `True`):
            Whether calls with a mask are packed; rows that arrive packed are kept apart either way.
        takes_positions (`bool`, *optional*, defaults to `True`):
            Whether the decoder takes `position_ids`, by which rows that arrive packed are told.
        model_call ([`ModelCall`], *optional*):
            The call of the module around the decoder, with ids that the decoder itself is not given.

    Returns:
        [`Layout`], *optional*: `None` if the call is to go through as it is: with a cache, packed by us already, or
        without anything to remove.

    Raises:
        PaddingRemovalError: If the call brings something that cannot be packed.
        ValueError: If mask and batch do not fit each other, or the mask cannot be read.
    """
    mask, ids, embeds = call.get("attention_mask"), call.get("input_ids"), call.get("inputs_embeds")
    if call.get("past_key_values") is not None or call.get("use_cache") is True:
        return None  # cached: generation, or a caller that asked for the cache
    if LAYOUT in call:
        return None  # packed already
    if call.get("encoder_hidden_states") is not None:
        raise PaddingRemovalError(
            "The decoder was called with `encoder_hidden_states`: its cross-attention looks at another sequence "
            "for each row, and a packed batch has no rows. Run this call inside `with handle.disabled():`."
        )
    batch = ids if ids is not None else embeds
    if batch is None:
        return None
    if mask is None:
        arrived = _arrived_packed(call, batch, prefix_sharing) if takes_positions else None
        if arrived is not None or not prefix_sharing or batch.shape[0] == 1:
            return arrived
        mask = torch.ones(batch.shape[:2], dtype=torch.int64, device=batch.device)
    elif not packs_padded or call.get("cu_seq_lens_q") is not None:
        return None
    _check_mask(mask, batch)
    if not prefix_sharing:
        return _in_step((mask,), "padding-free", lambda: padding_free_layout(mask))
    if model_call is not None and model_call.arguments:
        ids = ids if ids is not None else model_call.arguments.get("input_ids")
        if ids is not None:
            return _shared_if_it_pays(ids, mask, _keys(call, ids, mask, model_call))
    if not _is_shareable(call, prefix_sharing):
        return _in_step((mask,), "padding-free", lambda: padding_free_layout(mask))
    positions = call.get("position_ids")
    given = ids, call.get("attention_mask"), positions
    return _in_step(given, "prefix sharing", lambda: _shared_if_it_pays(call["input_ids"], mask, positions))


def layout_of_batch(ids: torch.Tensor, mask: torch.Tensor, *, prefix_sharing: PrefixSharing) -> Layout:
    """The layout of a call with these ids and this mask, and nothing else that could tell its tokens apart."""
    return _shared_if_it_pays(ids, mask) if prefix_sharing else padding_free_layout(mask)


def layout_of_given(kind: str, given: Given) -> Layout:
    """
    The layout that a call makes of what it is given; where that is on the host, so is the layout.

    Args:
        kind (`str`):
            `"padding-free"`, made of the mask; `"prefix sharing"`, of ids, mask and positions; or a [`packed_kind`],
            of ids, positions and bounds of rows that arrive packed.
        given (`tuple`):
            These tensors; positions and bounds may be `None`.
    """
    if kind == "padding-free":
        (mask,) = given
        assert mask is not None
        return padding_free_layout(mask)
    if kind == "prefix sharing":
        ids, mask, positions = given
        assert ids is not None
        assert mask is not None
        return _shared_if_it_pays(ids, mask, positions)
    batch, positions, bounds = given
    assert batch is not None
    if positions is None:
        positions = torch.arange(batch.shape[1], device=batch.device)
    positions = positions.expand(batch.shape[:2])
    if kind == packed_kind(True):
        layout = packed_layout(positions, cu_seqlens=bounds, input_ids=batch)
        if sharing_pays(layout):
            return layout
    return packed_layout(positions, cu_seqlens=bounds)


def packed_kind(shares: bool) -> str:
    """The kind of a layout of rows that arrive packed, for [`layout_of_given`]."""
    return f"packed, {shares}"


def _shared_if_it_pays(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None = None) -> Layout:
    layout = prefix_sharing_layout(ids, mask, positions)
    return layout if sharing_pays(layout) else padding_free_layout(mask)


def _arrived_packed(call: dict[str, Any], batch: torch.Tensor, prefix_sharing: PrefixSharing) -> Layout | None:
    """The layout of a call without a mask whose positions, or bounds, show several sequences in one row."""
    positions, bounds = call.get("position_ids"), call.get("cu_seq_lens_q")
    if positions is None and bounds is None:
        return None
    if positions is not None and positions.dim() != 2:
        return None  # rows of positions for images
    kind = packed_kind(bool(prefix_sharing) and _is_shareable(call, prefix_sharing))
    given = batch, positions, bounds
    layout = _in_step(given, kind, lambda: layout_of_given(kind, given))
    return None if layout.is_trivial else layout


def _keys(call: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor, model_call: ModelCall) -> torch.Tensor | None:
    """What identifies a token beside its id: positions, embeddings, features, and what it sees."""
    keys = token_keys(call, ids.shape)
    if model_call.prepared is None:
        return keys
    given = [] if keys is None else [*keys]
    return torch.cat([*(key[None] for key in given), model_call.prepared.keys(mask, [ids, *given])])


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


def _is_shareable(call: dict[str, Any], prefix_sharing: PrefixSharing) -> bool:
    """
    Whether the ids of a call say which of its tokens are equal; with `"auto"` a call that does not share is no error.

    Raises:
        PaddingRemovalError: If they do not, and sharing was asked for.
    """
    ids = call.get("input_ids")
    if ids is None:
        if prefix_sharing == "auto":
            return False
        raise PaddingRemovalError(
            "`prefix_sharing=True` compares token ids, and the decoder was called with `inputs_embeds`. Attach "
            "with `prefix_sharing=False`: padding is removed all the same."
        )
    others = [k for k, v in call.items() if isinstance(v, torch.Tensor) and v.shape[:2] == ids.shape]
    others = [k for k in others if k not in ("input_ids", "attention_mask", "position_ids", "labels", "seq_idx")]
    if others and prefix_sharing != "auto":
        raise PaddingRemovalError(
            f"`prefix_sharing=True` compares token ids and positions, and the call also carries {others} for each "
            "token. Attach with `prefix_sharing=False`, or leave them out."
        )
    return not others


class _Built(NamedTuple):
    given: Given
    versions: tuple[int | None, ...]
    kind: str
    layout: Layout


_built: ContextVar[list[_Built] | None] = ContextVar("trl_padfix_step_layouts", default=None)


@contextmanager
def step_layouts(known: Iterable[Known] = ()) -> Iterator[None]:
    """
    Let forwards that are given the very same tensors share one layout, until the block ends.

    For a block in which nobody writes to these tensors, as the forwards of policy and reference in one step of
    training. Outside of it every forward reads its own mask and ids, since tensors can be written to unseen: by
    collectives, through `.data`, from numpy and from other processes.

    Args:
        known (`Iterable`, *optional*):
            Layouts that came with the batch of the step, each with its kind and the tensors that it was made of; see
            [`layout_of_given`].
    """
    token = _built.set([_Built(given, _versions(given), kind, layout) for kind, given, layout in known])
    try:
        yield
    finally:
        _built.reset(token)


@contextmanager
def known_too(kind: str, given: Given, layout: Layout) -> Iterator[None]:
    """What the running step knows, and until the block ends one layout more; nothing outside of a step."""
    before = _built.get()
    if before is None:
        yield
        return
    token = _built.set([*before, _Built(given, _versions(given), kind, layout)])
    try:
        yield
    finally:
        _built.reset(token)


def known_layout(kind: str, given: Given) -> Layout | None:
    """The layout that the running step has for these tensors, if it has one."""
    step, versions = _built.get() or [], _versions(given)
    for known in step:
        if known.kind == kind and known.versions == versions and all(map(_is_same, known.given, given)):
            return known.layout
    return None


def said_to_repeat(x: torch.Tensor) -> bool:
    """Whether the batch of the running step has a tensor like `x`, and came with word that its halves are the same."""
    said = [known for known in _built.get() or [] if known.kind == REPEATED]
    unchanged = [t for known in said if known.versions == _versions(known.given) for t in known.given if t is not None]
    return any(t.shape == x.shape and t.device == x.device for t in unchanged)


def _in_step(given: Given, kind: str, build: Callable[[], Layout]) -> Layout:
    """What `build` makes of the tensors that are `given`, unless the step has it already."""
    step = _built.get()
    build = torch.inference_mode(False)(build)  # it may serve a forward with gradients later
    if step is None or any(t is not None and t.is_inference() for t in given):
        return build()
    layout = known_layout(kind, given)
    if layout is None:
        layout = build()
        step.append(_Built(given, _versions(given), kind, layout))
    return layout


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are one, or views of the same values: a slice of all rows is another object."""
    if a is None or b is None or a is b:
        return a is b
    alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device
    return alike and b._is_view() and a.data_ptr() == b.data_ptr()


def _versions(given: Given) -> tuple[int | None, ...]:
    """How often each tensor was written to; nothing of tensors that do not count it."""
    return tuple(None if t is None or t.is_inference() else t._version for t in given)
